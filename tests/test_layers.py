"""The layers of csrc/, read off the sources: who may include what, and where a vendor's words may stand.

Each rule is shown to fire on a planted violation, and to keep quiet where it should.
"""

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".hpp", ".cpp", ".cuh", ".cu"}

# Layer -> the layers that it may include. The simulated card is a vendor's runtime and compiles csrc/gpu for itself.
MAY_INCLUDE = {
    "common": {"common"},
    "cpu": {"cpu", "common"},
    "gpu": {"gpu", "common"},
    "gpu/vendor": {"gpu", "common", "sim"},
    "sim": {"sim", "gpu", "common"},
    "torch": {"torch", "gpu", "cpu", "common"},
    "python": {"python", "common"},
}
TORCH_HEADER = re.compile(r"(torch|ATen|c10|caffe2|executorch)/")
STANDARD_HEADER = re.compile(r"[a-z_]+")  # <cstdint>; C's own <math.h> is not wanted
SYSTEM_HEADERS = {
    "cpu": {"immintrin.h", "xmmintrin.h", "arm_neon.h"},
    "torch": {"dlfcn.h", "pthread.h"},
    "python": {"dlfcn.h"},
}

VENDOR_WORD = re.compile(r"\b(?:cuda|hip)[A-Z_]\w*|\bcu[A-Z]\w*|\bCU[a-z]\w*|\b(?:CUDA|CUDART|HIP)_\w+|\b__nv_\w+")
COMPILER_WORD = re.compile(
    r"\b(?:__CUDA_ARCH__|CUDA_VERSION|CUDART_VERSION|__HIP_PLATFORM_\w+|__HIP_DEVICE_COMPILE__|__HIP_ARCH_\w+"
    r"|__AMDGCN_\w+|__gfx\w+__|warpSize)\b"
)
LANE_WORD = re.compile(r"\b__(?:shfl|ballot|any|all|activemask|syncwarp|reduce_\w+|match_\w+)\w*\s*\(")
COMPILER_PICK = re.compile(r"\b__(?:CUDACC|HIPCC|NVCC|HIP|CUDA)__\b")
NUMBER = re.compile(r"(?<![\w.])\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*")
SHIFT_BY_LANES = re.compile(r"(?:>>|<<)=?\s*5[uUlL]*\b(?!\.)")
LANE_NUMBERS = {31, 32, 0xFFFFFFFF}

# "@" keeps this file from holding what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:w@ork|r@oot|h@ome|U@sers|m@nt)/[\w.]".replace("@", ""))
PACKAGE_HOST = re.compile(
    r"\b(?:py@pi\.org|python@hosted\.org|download\.py@torch|deb\.deb@ian|nv@idia\.com|rad@eon\.com|an@aconda\.org)".replace(
        "@", ""
    )
)


def strip(text: str, *, strings: bool) -> str:
    """`text` without comments, and with `strings` without the insides of literals. Line numbers stay."""
    kept = re.compile(
        r'(?P<raw>\bR"(?P<tag>[^ ()\\\t\v\f\n]*)\((?s:.*?)\)(?P=tag)")'
        r'|(?P<string>"(?:\\.|[^"\\\n])*")'
        r"|(?P<char>(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+')"
        r"|(?P<comment>//(?:\\\n|[^\n])*|/\*(?s:.*?)\*/)"
    )

    def replace(match: re.Match) -> str:
        whole = match.group()
        if match["comment"] is not None:
            return " " + "\n" * whole.count("\n")
        if not strings:
            return whole
        return whole[0] + "\n" * whole.count("\n") + whole[-1]

    return kept.sub(replace, text)


def number(token: str) -> int | None:
    plain = token.replace("'", "").rstrip("uUlLzZ")
    try:
        return int(plain, 0) if not re.fullmatch(r"0\d+", plain) else int(plain, 8)
    except ValueError:
        return None


def layer_violations(root: Path) -> list[str]:
    """`rule: file:line: what` for each line of root/csrc that breaks a rule."""
    found = []
    vendor_picks = {}
    csrc = root / "csrc"
    for path in sorted(p for p in csrc.rglob("*") if p.is_file()):
        name = path.relative_to(csrc).as_posix()
        layer = name.split("/")[0]
        in_vendor = name.startswith("gpu/vendor/")

        def report(rule, line, what, name=name):
            found.append(f"{rule}: csrc/{name}:{line}: {what.strip()}")

        if layer not in MAY_INCLUDE or path.suffix not in SUFFIXES:
            report("layer", 1, "no layer of ours has such a file")
            continue
        source = path.read_text()
        for line, text in enumerate(strip(source, strings=False).splitlines(), 1):
            include = re.match(r'\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")', text)
            if not include:
                if re.match(r"\s*#\s*include", text):
                    report("include", line, text)
                continue
            system, own = include.groups()
            if own is not None:
                target = csrc / own
                vendor = own.startswith("gpu/vendor/")  # of a vendor that is still to come, perhaps
                if not (target.is_file() or vendor):
                    report("include", line, f"{own} is no file of csrc/ (write the path from there)")
                elif own.split("/")[0] not in MAY_INCLUDE["gpu/vendor" if in_vendor else layer]:
                    report("direction", line, text)
                if vendor and not in_vendor:
                    vendor_picks.setdefault(name, []).append(line)
            elif TORCH_HEADER.match(system):
                if layer != "torch":
                    report("torch", line, text)
            elif system.startswith("pybind11/") or system == "Python.h":
                if layer != "python":
                    report("pybind11", line, text)
            elif not (
                in_vendor  # a vendor's, or the simulated card's, which lean on the system as they must
                or layer == "sim"
                or STANDARD_HEADER.fullmatch(system)
                or system in SYSTEM_HEADERS.get(layer, ())
            ):
                report("system header", line, text)

        if in_vendor:
            continue
        for line, text in enumerate(strip(source, strings=True).splitlines(), 1):
            if VENDOR_WORD.search(text):
                report("vendor word", line, text)
            if COMPILER_WORD.search(text):
                report("compiler word", line, text)
            if COMPILER_PICK.search(text) and name not in ("gpu/vendor.hpp", "common/host_device.hpp"):
                report("compiler pick", line, text)
            if layer == "gpu" and name != "gpu/lanes.cuh":
                if any(number(m.group()) in LANE_NUMBERS for m in NUMBER.finditer(text)) or SHIFT_BY_LANES.search(text):
                    report("lane number", line, text)
                if LANE_WORD.search(text):
                    report("lane word", line, text)
    if (csrc / "gpu/vendor").is_dir() and list(vendor_picks) != ["gpu/vendor.hpp"]:
        found.append(f"vendor pick: csrc/gpu/vendor.hpp alone picks the vendor header, not {vendor_picks}")
    return found


def place_violations(root: Path, files: list[str]) -> list[str]:
    """Paths of the machine at hand and hosts of package indexes: neither belongs in a file that others get."""
    found = []
    for name in files:
        try:
            lines = (root / name).read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for line, text in enumerate(lines, 1):
            if MACHINE_PATH.search(text):
                found.append(f"machine path: {name}:{line}: {text.strip()}")
            if PACKAGE_HOST.search(text):
                found.append(f"package host: {name}:{line}: {text.strip()}")
    return found


def project_files() -> list[str]:
    """What git tracks or would; where there is no git (an unpacked sdist), all that lies here but what is made."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    git = shutil.which("git") and subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if git and git.returncode == 0:
        return [name for name in git.stdout.split("\0") if (ROOT / name).is_file()]
    made = re.compile(r"(^|/)(\.git|\.venv|build|dist|\.\w+_cache|\.hypothesis|__pycache__|[^/]+\.egg-info)/|\.so$")
    files = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())
    return [name for name in files if not made.search(name)]


def test_layers():
    assert present_violations() == []


def test_no_machine_path_and_no_package_host():
    files = project_files()
    assert "csrc/common/geometry.hpp" in files
    assert place_violations(ROOT, files) == []


PLANTED = [
    ("torch", "common", "#include <torch/csrc/stable/tensor.h>"),
    ("torch", "gpu", "#include <ATen/ATen.h>"),
    ("torch", "cpu", "#  include <c10/util/Exception.h>"),
    ("torch", "python", "#include <torch/extension.h>"),
    ("pybind11", "torch", "#include <pybind11/pybind11.h>"),
    ("pybind11", "common", "#include <Python.h>"),
    ("include", "gpu", '#include "torch/all.h"'),
    ("include", "gpu", '#include "lanes.cuh"'),
    ("include", "gpu", "#include SOMETHING"),
    ("direction", "common", '#include "cpu/read.hpp"'),
    ("direction", "common", '#include "gpu/vendor.hpp"'),
    ("direction", "gpu", '#include "cpu/read.hpp"'),
    ("direction", "gpu", '#include "torch/read_op.hpp"'),
    ("direction", "cpu", '#include "gpu/vendor.hpp"'),
    ("direction", "gpu", '#include "sim/card.hpp"'),
    ("direction", "sim", '#include "cpu/read.hpp"'),
    ("direction", "python", '#include "gpu/fused_gr.hpp"'),
    ("system header", "common", "#include <immintrin.h>"),
    ("system header", "gpu", "#include <cuda_runtime.h>"),
    ("system header", "torch", "#include <cuda_runtime_api.h>"),
    ("vendor pick", "gpu", '#include "gpu/vendor/cuda.hpp"'),
    ("vendor word", "gpu", "auto e = cudaGetLastError();"),
    ("vendor word", "gpu", "hipStream_t s;"),
    ("vendor word", "torch", "CUstream s;"),
    ("vendor word", "common", "int v = HIP_VERSION;"),
    ("vendor word", "cpu", "int v = CUDART_VERSION;"),
    ("compiler word", "gpu", "#if __CUDA_ARCH__ >= 800"),
    ("compiler word", "gpu", "#if CUDA_VERSION >= 12080"),
    ("compiler word", "common", "#ifdef __HIP_PLATFORM_AMD__"),
    ("compiler word", "gpu", "int w = warpSize;"),
    ("compiler word", "gpu", "int w = __AMDGCN_WAVEFRONT_SIZE__;"),
    ("compiler pick", "gpu", "#ifdef __HIPCC__"),
    ("lane number", "gpu", "int l = t % 32;"),
    ("lane number", "gpu", "int l = t & 31u;"),
    ("lane number", "gpu", "int l = t & 0x1F;"),
    ("lane number", "gpu", "int w = t >> 5;"),
    ("lane number", "gpu", "int w = t >>5u;"),
    ("lane number", "gpu", "t >>= 5;"),
    ("lane number", "gpu", "unsigned m = 0xffffffff;"),
    ("lane number", "gpu", "unsigned m = 0xFFFF'FFFFu;"),
    ("lane number", "gpu", "unsigned long m = 0XffffFFFFULL;"),
    ("lane number", "gpu", "unsigned m = 4294967295u;"),
    ("lane number", "gpu", "/* a */ int l = t % 32; // b"),
    ("lane number", "gpu", 'say("//"); int l = t % 32;'),
    ("lane word", "gpu", "v = __shfl_xor_sync(m, v, 1);"),
    ("lane word", "gpu", "m = __activemask();"),
]


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    return tmp_path


@functools.cache
def present_violations() -> list[str]:
    return layer_violations(ROOT)


def planted_violations(copy: Path) -> list[str]:
    return [v for v in layer_violations(copy) if v not in present_violations()]


@pytest.mark.parametrize(("rule", "layer", "line"), PLANTED, ids=[f"{r}-{i}" for i, (r, _, _) in enumerate(PLANTED)])
def test_each_rule_fires(copy, rule, layer, line):
    (copy / "csrc" / layer / "planted.hpp").write_text(f"#pragma once\n{line}\n")
    found = planted_violations(copy)
    assert any(v.startswith(f"{rule}: csrc/{layer}/") for v in found), found


def test_a_file_of_no_layer_is_found(copy):
    (copy / "csrc/gpu/planted.hip").write_text("")
    (copy / "csrc/util").mkdir()
    (copy / "csrc/util/planted.hpp").write_text("")
    assert [v.split(": ")[:2] for v in planted_violations(copy)] == [
        ["layer", "csrc/gpu/planted.hip:1"],
        ["layer", "csrc/util/planted.hpp:1"],
    ]


def test_the_vendor_header_is_picked_somewhere(copy):
    guard = copy / "csrc/gpu/vendor.hpp"
    guard.write_text(re.sub(r'#include "gpu/vendor/.*', "", guard.read_text()))
    assert [v.split(":")[0] for v in planted_violations(copy)] == ["vendor pick"]


ALLOWED = r"""
// 32 lanes, 0xffffffff, t >> 5, cudaMalloc, __CUDA_ARCH__, warpSize, #include <torch/all.h>
/* hipMalloc
   31 */
#include <cstdint>
const char* text = "cudaErrorIllegalAddress 32 \" 31 >> 5 warpSize";
const char* raw = R"(" 32 )";
char letter = '"'; std::uint32_t number = 1032; std::int64_t other = 0x32, third = 3'2'0, kLanes32 = 320;
float f = 32.0f + 1e32f + 1e-32f + 0.32f + 31.5f; int s = number >> 50; double d = number >> 5.0;
int hipster = 1, cudalike = 2; bool hip = false; constexpr unsigned long long mask = 0xffffffffffULL;
int long_comment_end = 1; // a comment that goes on \
   with 32 in its second line
"""


def test_rules_keep_quiet(copy):
    (copy / "csrc/gpu/planted.hpp").write_text(ALLOWED)
    assert planted_violations(copy) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("machine path", "cd /w@ork/main"),
        ("machine path", "see /h@ome/someone/notes"),
        ("machine path", "'/r@oot/.cache'"),
        ("package host", "pip install -i https://py@pi.org/simple"),
        ("package host", "https://download.py@torch.org/whl/cpu"),
        ("package host", "deb http://deb.deb@ian.org/debian"),
    ],
)
def test_places_are_found(tmp_path, rule, text):
    (tmp_path / "planted").write_text("fine\n" + text.replace("@", "") + "\n")
    assert [v.split(": ")[:2] for v in place_violations(tmp_path, ["planted"])] == [[rule, "planted:2"]]


def test_places_keep_quiet(tmp_path):
    (tmp_path / "planted").write_text("/usr/local/cuda, a/work/b, /dev/null, pip install, import home.work\n")
    assert place_violations(tmp_path, ["planted"]) == []
