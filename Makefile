# make demo     a real read on this machine: sets up .venv, builds, runs
# make test     C++ tests, Python tests, style: sets up .venv, builds, runs
# make build    just the libraries, into strata_ops/ of this checkout
# make style    just the style and type checks; make format rewrites what they would complain about
# make docs     the documentation as pages, build/docs/index.html
# make hip-report   registers, spills and schedule of the AMD kernels (build/hip_report.json)
# make selftest-hashes   write the CPU's answers to the self-test anew, after a change of the arithmetic
# make clean    forget the build (not .venv)
#
# make test PYTHON=python3 uses an environment that already has torch and what requirements-dev.txt names. Nothing is
# installed into it: the libraries stay in this checkout, and Python finds them there.
#
# STRATA_CUDA=OFF leaves the CUDA library out, ON insists on it; unset, it is built where there is an nvcc. STRATA_HIP says
# the same of the HIP library.
# STRATA_REQUIRE_ALL=1 makes an error of everything that would be left out.

.DEFAULT_GOAL := help
.PHONY: help demo test selftest-hashes build style format docs clean

TORCH := torch==2.13.0
STRATA_CUDA ?= TRY
STRATA_HIP ?= TRY
STRATA_REQUIRE_ALL ?=
export STRATA_REQUIRE_ALL

ifeq ($(origin PYTHON),command line)
python := $(PYTHON)
ready :=
else
python := $(CURDIR)/.venv/bin/python
ready := .venv/.ready
endif
# cmake, ninja, ruff and clang-format come from that environment where it has them.
in_environment = PATH="$$($(python) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH"

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

.venv/.ready: requirements-dev.txt
	@python3 -c 'import sys; sys.exit("strata_ops needs Python 3.10 or later" if sys.version_info < (3, 10) else 0)'
	@test -x .venv/bin/pip || { echo "setup: making .venv"; python3 -m venv .venv; }
	@.venv/bin/python -c 'import torch' 2>/dev/null || { \
	    echo "setup: installing $(TORCH) into .venv (some minutes where it has to be downloaded)"; \
	    .venv/bin/python -m pip install --disable-pip-version-check '$(TORCH)'; }
	@.venv/bin/python cmake/python_headers.py
	@echo "setup: installing the tools of requirements-dev.txt into .venv"
	@.venv/bin/python -m pip install --disable-pip-version-check -qq -r requirements-dev.txt
	@touch $@

build: $(ready)
	@echo "build: with $(python)"
	@$(in_environment); for tool in cmake ninja; do command -v $$tool >/dev/null || { \
	    echo "$$tool is missing: $(python) -m pip install -r requirements-dev.txt"; exit 1; }; done
	@$(in_environment) cmake -S . -B build -G Ninja -DPython_EXECUTABLE="$$($(python) -c 'import sys; print(sys.executable)')" \
	    $(addprefix -DPython_INCLUDE_DIR=,$(if $(ready),$(dir $(wildcard $(CURDIR)/.venv/include/python*/Python.h)))) \
	    -DSTRATA_CUDA=$(STRATA_CUDA) -DSTRATA_HIP=$(STRATA_HIP) -DSTRATA_TESTS=ON -DSTRATA_WARNINGS_ARE_ERRORS=ON \
	    -DSTRATA_REQUIRE_ALL=$(if $(STRATA_REQUIRE_ALL),ON,OFF)
	@$(in_environment) cmake --build build
	@rm -rf strata_ops/lib strata_ops/_core*.so
	@$(in_environment) cmake --install build --prefix strata_ops >/dev/null

demo: build
	@$(python) -m strata_ops demo

test: build
	@echo "test: C++"
	@$(in_environment) ctest --test-dir build --output-on-failure --parallel 2
	@echo "test: Python"
	@$(python) -m pytest
	@$(MAKE) --no-print-directory style

selftest-hashes: build
	@build/tests/cpp/selftest_hashes --write csrc/common/selftest_hashes.hpp
	@echo "written: csrc/common/selftest_hashes.hpp; raise kArithmeticVersion where it changed, and build again"

cpp_files = $$(find csrc tests -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh')
have = $(in_environment) command -v $(1) >/dev/null || { echo "left out: $(1) is missing (pip install -r requirements-dev.txt)"; \
    test -z "$(STRATA_REQUIRE_ALL)"; exit; }

style: $(ready)
	@echo "style: ruff"
	@$(call have,ruff); $(in_environment); ruff check . && ruff format --check .
	@echo "style: clang-format"
	@$(call have,clang-format); $(in_environment); clang-format --dry-run -Werror $(cpp_files)
	@echo "style: mypy"
	@$(call have,mypy); $(in_environment); mypy --no-error-summary --python-executable $(python)

format: $(ready)
	@$(in_environment); ruff check --fix . ; ruff format . ; clang-format -i $(cpp_files)

docs: $(ready)
	@echo "docs: mkdocs"
	@$(call have,mkdocs); $(in_environment); mkdocs build

clean:
	rm -rf build strata_ops/lib strata_ops/_core*.so

# AMD, without a card. The instruction emulator's table: tests/isa/parity.py, which says what it needs.
.PHONY: hip-report
hip-report: $(ready)
	@$(python) tests/isa/report.py
