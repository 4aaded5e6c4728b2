"""The bounds on what compilers make of the kernels: `make hip-report` as a test, and tests of the reader itself."""

import json
import os
import sys
from pathlib import Path

import pytest

from test_hip import have, unavailable

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/isa"))
import codegen  # noqa: E402
import report  # noqa: E402
from schedule import demangled, parse, schedule  # noqa: E402

KEYS = {
    "target", "compiler", "name", "variant", "tokens", "dispatched", "vgprs", "sgprs", "lds_bytes", "scratch_bytes",
    "vgpr_spills", "waves_per_simd", "loop_barriers", "loop_barriers_waiting_for_loads", "prefetch",
}  # fmt: skip


@pytest.fixture(scope="module")
def result():
    hip = have(codegen.hip)
    compilers = ["clang"]
    try:
        codegen.triton_package()
        compilers.append("llvm24")
    except codegen.Unavailable as reason:
        if os.environ.get("STRATA_REQUIRE_ALL"):
            unavailable(reason)
    made = report.report(codegen.hip_facts.archs(hip)[0], compilers)
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build/hip_report.json").write_text(json.dumps(made, indent=1) + "\n")
    print(report.table(made))
    return made


def rows(result, **wanted):
    return [row for row in result["kernels"] if all(row[key] == value for key, value in wanted.items())]


def overlapping(result):
    return [row for row in rows(result) if row["prefetch"] and not row["scratch_bytes"]]


def test_shape(result):
    assert set(result) == {"compilers", "kernels"}
    assert all(set(row) == KEYS for row in result["kernels"])
    for target in ("gfx1201", "gfx1200", "gfx1100", "gfx942", "gfx90a"):
        for compiler in result["compilers"]:
            names = {row["name"] for row in rows(result, target=target, compiler=compiler)}
            for tokens in ("1, true", "2, true", "3, true", "4, true", "8, false"):
                assert f"gr_down_register_half_kernel<{tokens}>" in names
                assert f"gr_down_staged_kernel<{tokens}>" in names
    assert {row["target"] for row in rows(result, variant="p4", dispatched=True)} == {"gfx1200", "gfx1201"}


def test_nothing_that_is_dispatched_spills(result):
    bad = [row for row in rows(result, dispatched=True) if row["scratch_bytes"] or row["vgpr_spills"]]
    assert bad == []


def test_no_barrier_waits_for_a_load(result):
    """In the steady loop of staged and P4, on every target."""
    seen = overlapping(result)
    assert len(seen) >= 2 * 5 * 5
    assert [(row["target"], row["compiler"], row["name"]) for row in seen if row["loop_barriers"] != 2] == []
    assert [row for row in seen if row["loop_barriers_waiting_for_loads"]] == []


def test_every_prefetch_is_hidden_by_dots(result):
    """At least one tile's dot between the request and the first wait; half a dot for half B."""
    for row in overlapping(result):
        dot = report.dot_operations(row["name"])
        found = {fetch["group"]: fetch["fp32_ops_before_first_wait"] for fetch in row["prefetch"]}
        assert set(found) == ({"weights", "half_a", "half_b"} if row["variant"] == "p4" else {"weights"}), row
        for group, operations in found.items():
            assert operations >= (dot / 2 if group == "half_b" else dot), row


# ---------------------------------------------------------------------------------------------------------------------
# The reader


def test_names():
    assert demangled("_ZN6strata3gpu20gr_up_runtime_kernelENS0_9GroupArgsE") == "gr_up_runtime_kernel"
    norm = "_ZN6strata3gpu14gr_norm_kernelILi4ENS_6Bf16x4EEEvNS0_9GroupArgsE"
    assert demangled(norm) == "gr_norm_kernel<4, Bf16x4>"


LOOP = """\
_ZN6strata3gpu28gr_down_register_half_kernelILi4ELb1EEEvNS0_9GroupArgsE:
	s_mov_b32 s0, 0
.LBB0_1:
	global_load_b128 v[0:3], v[8:9], off
	{first}
	s_barrier_signal -1
	s_barrier_wait -1
	v_mul_f32_e32 v20, v4, v10
	v_dual_fmac_f32 v20, v4, v10 :: v_dual_mov_b32 v21, v5
	{middle}
	v_dual_fmac_f32 v20, v4, v10 :: v_dual_add_f32 v21, v5, v20
	s_barrier_signal -1
	s_barrier_wait -1
	s_wait_loadcnt 0x0
	v_lshlrev_b32_e32 v4, 16, v0
	s_cbranch_scc0 .LBB0_1
	s_endpgm
.Lfunc_end0:
amdhsa.kernels:
  - .name:           _ZN6strata3gpu28gr_down_register_half_kernelILi4ELb1EEEvNS0_9GroupArgsE
    .vgpr_count:     42
    .vgpr_spill_count: 3
"""


def read(first="s_nop 0", middle="s_nop 0"):
    (kernel,) = parse(LOOP.format(first=first, middle=middle))
    return kernel, schedule(kernel)


def test_reader_counts_operations_and_facts():
    kernel, found = read()
    assert (kernel.name, kernel.facts) == (
        "gr_down_register_half_kernel<4, true>", {"vgpr_count": 42, "vgpr_spill_count": 3},
    )  # fmt: skip
    assert (found.fp32, found.barriers, found.barriers_waiting) == (4, 2, 0)
    assert [(fetch.group, fetch.fp32) for fetch in found.prefetches] == [("weights", 4)]


def test_reader_sees_a_barrier_that_waits():
    _, found = read(first="s_wait_loadcnt_dscnt 0x0")
    assert (found.barriers_waiting, found.prefetches[0].fp32) == (1, 0)


def test_reader_sees_an_early_wait():
    _, found = read(middle="s_wait_loadcnt 0x0")
    assert (found.barriers_waiting, found.prefetches[0].fp32) == (0, 2)


def test_reader_lets_the_youngest_stay_on_their_way():
    _, found = read(middle="s_wait_loadcnt 0x1")
    assert found.prefetches[0].fp32 == 4
