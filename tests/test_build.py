"""The built libraries: what they need, what they show, what they were compiled to.

Reads them with readelf and nm (binutils, which comes with a compiler), and the object files and compiler output that
`make build` leaves in build/.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import strata_ops

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(strata_ops.__file__).resolve().parent
LIBRARIES = sorted(PACKAGE.glob("lib/*.so")) + sorted(PACKAGE.glob("_core*.so"))

# What each needs beside SYSTEM. The CUDA runtime is linked into our library, and torch's streams are found in the
# process, so that the CUDA library needs nothing of NVIDIA's.
NEEDS = {
    "libstrata_cpu": {"libtorch_cpu.so"},
    "libstrata_cuda": {"libtorch_cpu.so"},
    "libstrata_hip": {"libtorch_cpu.so", "libamdhip64.so"},
    "libstrata_sim": set(),
    "libstrata_sim_strict": set(),
    "_core": set(),
}
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0"}
VENDOR_RUNTIMES = {
    "cuda": re.compile(r"lib(cuda|cudart|nv[a-z]+|torch_cuda|c10_cuda|cu[a-z]+)\b"),
    "hip": re.compile(r"lib(amdhip64|hsa-runtime64|torch_hip|c10_hip|roc[a-z]+|hip[a-z]+)\b"),
}
BUILD = ROOT / "build"


def missing(what: str):
    """A part that was not built: an error where all parts are asked for, else skipped in so many words."""
    if os.environ.get("STRATA_REQUIRE_ALL"):
        pytest.fail(f"{what}, and STRATA_REQUIRE_ALL is set")
    pytest.skip(what)


def tool(*command) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True, env=environment).stdout


def short(library: Path) -> str:
    return library.name.split(".")[0]


def needed(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", tool("readelf", "-d", library)))


def symbols(library: Path, which: str) -> dict[str, str]:
    """Name -> nm's letter. Versions ("memcpy@GLIBC_2.14") are cut off."""
    lines = (line.split() for line in tool("nm", "-D", which, library).splitlines())
    return {words[-1].split("@")[0]: words[-2] for words in lines if len(words) >= 2}


def find_library(name: str) -> Path:
    if name.startswith("libtorch"):
        return Path(importlib.util.find_spec("torch").origin).parent / "lib" / name
    found = tool(os.environ.get("CC", "cc"), f"-print-file-name={name}").strip()
    return Path(found).resolve()


def test_the_libraries_are_there():
    assert {short(library) for library in LIBRARIES} >= {"libstrata_cpu", "_core"}
    if not (PACKAGE / "lib/libstrata_cuda.so").exists():
        missing("the CUDA library was not built")


each_library = pytest.mark.parametrize("library", LIBRARIES, ids=short)


@each_library
def test_needs_no_two_vendors(library):
    vendors = {v for v, runtime in VENDOR_RUNTIMES.items() if any(runtime.match(name) for name in needed(library))}
    assert len(vendors) <= 1
    if short(library) in ("libstrata_cpu", "_core"):
        assert not vendors


@each_library
def test_needs_nothing_else(library):
    names = needed(library) - SYSTEM
    names = {re.sub(r"^(libamdhip64\.so).*", r"\1", name) for name in names if not name.startswith("ld-linux")}
    assert names == NEEDS[short(library)]


@each_library
def test_names_no_folder_to_load_from(library):
    assert not re.search(r"\((RPATH|RUNPATH)\)", tool("readelf", "-d", library))


@each_library
def test_shows_one_symbol(library):
    entry = "PyInit__core" if short(library) == "_core" else "strata_backend"
    shown = set(symbols(library, "--defined-only"))
    if short(library).startswith("libstrata_sim"):  # and what opens a card (cmake/sim_exports.map)
        shown = {name for name in shown if not name.startswith("strata_sim_")}
    assert shown == {entry}


@each_library
def test_every_symbol_it_asks_for_exists(library):
    offered = set()
    for name in needed(library):
        if (path := find_library(name)).is_file():
            offered |= symbols(path, "--defined-only").keys()
    asked = {name for name, kind in symbols(library, "--undefined-only").items() if kind == "U"}
    if short(library) == "_core":
        asked = {name for name in asked if not re.match(r"_?Py", name)}  # the interpreter's
    assert asked - offered == set()


def test_wide_instructions_stay_in_their_files():
    """An inline function that several files emit is kept once, from whichever file the linker met first: one that was
    compiled for AVX-512 would end a process on a processor without it. So those files may emit none."""
    objects = sorted(BUILD.glob("CMakeFiles/strata_cpu_core.dir/csrc/cpu/read_avx*.o"))
    if not objects:
        missing("the CPU library was not built in build/, so there are no object files to read")
    assert len(objects) == 2
    shared = {}
    for path in objects:
        lines = (line.split() for line in tool("nm", "-C", "--defined-only", path).splitlines())
        weak = [" ".join(words[2:]) for words in lines if words[1] in "WwVvu"]
        if weak:
            shared[path.name] = weak
    assert shared == {}


# ---------------------------------------------------------------------------------------------------------------------
# Registers and spills of the CUDA kernels


SPILLS = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"


def kernel_reports(logs: list[str]) -> dict[tuple[str, str], dict[str, int]]:
    """(architecture, kernel) -> registers, stack, stores, loads, from the output of `-Xptxas -v`."""
    reports = {}
    for log in logs:
        current = properties = None
        for line in log.splitlines():
            if match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
                current = reports.setdefault((match[2], match[1]), {})
            elif match := re.search(r"Function properties for (\w+)", line):
                properties = match[1]
            elif match := re.search(SPILLS, line):
                # A function that was not inlined has properties of its own: what it spills is its kernel's.
                for key, value in zip(("stack", "stores", "loads"), match.groups(), strict=True):
                    current[key] = current.get(key, 0) + int(value)
            elif match := re.search(r"Used (\d+) registers", line):
                current["registers"] = int(match[1])
                properties = None
        assert properties is None, f"the output ends in the middle of {properties}"
    return reports


def spilling(reports) -> list[str]:
    return [
        f"{arch} {kernel}: {report}"
        for (arch, kernel), report in sorted(reports.items())
        if any(report.get(key, 1) for key in ("stack", "stores", "loads")) or "registers" not in report
    ]


def demangled(names: list[str]) -> list[str]:
    full = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"^void |strata::(?:gpu::)?|\(.*\)$|\((?:int|bool)\)", "", name) for name in full.splitlines()]


def built_reports():
    logs = sorted(BUILD.glob("CMakeFiles/strata_cuda.dir/csrc/gpu/*.cu.o.log"))
    if not logs:
        missing("the CUDA library was not built in build/, so there is no compiler output to read")
    return kernel_reports([path.read_text() for path in logs])


def test_cuda_kernels_do_not_spill():
    reports = built_reports()
    archs = sorted({arch for arch, _ in reports}, key=lambda arch: int(re.sub(r"\D", "", arch)))
    kernels = sorted({kernel for _, kernel in reports})
    table = [f"{'registers':60s}" + "".join(f"{arch:>8s}" for arch in archs)]
    for name, kernel in sorted(zip(demangled(kernels), kernels, strict=True)):
        cells = (reports.get((arch, kernel), {}).get("registers", "?") for arch in archs)
        table.append(f"{name:60s}" + "".join(f"{cell:>8}" for cell in cells))
    (BUILD / "registers.txt").write_text("\n".join(table) + "\n")
    print("\n".join(table))

    assert "-Xptxas=-v" in (BUILD / "build.ninja").read_text()
    assert len(reports) == len(archs) * len(kernels), "a kernel is missing for some architecture"
    for part in ("register_half", "staged", "plain", "norm", "up"):
        assert any(part in kernel for kernel in kernels), f"no {part} kernel was compiled"
    assert spilling(reports) == []


def test_clusters_of_eight_tokens_share_a_multiprocessor_as_planned():
    """By their registers one block of stream's down kernel and one of its up kernel fit, and two of the latter do not
    (csrc/gpu/cluster_up.cuh says why). On the cards that give a block enough shared memory for eight tokens."""
    found = set()
    for (arch, kernel), report in built_reports().items():
        if arch not in ("sm_90", "sm_100", "sm_103") or "ILi8E" not in kernel:
            continue
        if "gr_cluster_down_kernel" in kernel:
            assert report["registers"] <= 96, (arch, kernel)
        elif "gr_cluster_up_kernel" in kernel:
            assert 96 < report["registers"] <= 104, (arch, kernel)
        else:
            continue
        found.add((arch, kernel))
    assert len(found) % 6 == 0 and found, "two instances of down and four of up for each architecture"


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Zgood' for 'sm_75'
ptxas info    : Function properties for _Zgood
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 139 registers, used 1 barriers, 504 bytes cmem[0]
ptxas info    : Compiling entry function '_Zother' for 'sm_75'
ptxas info    : Function properties for _Zother
    {}
ptxas info    : Used 32 registers, used 1 barriers, 504 bytes cmem[0]
"""


@pytest.mark.parametrize(
    ("line", "spills"),
    [
        ("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", False),
        ("8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", True),
        ("0 bytes stack frame, 84 bytes spill stores, 0 bytes spill loads", True),
        ("0 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads", True),
        ("", True),  # says nothing: not taken for good
    ],
)
def test_spills_are_seen(line, spills):
    reports = kernel_reports([PTXAS.format(line)])
    assert set(reports) == {("sm_75", "_Zgood"), ("sm_75", "_Zother")}
    assert [text.split(":")[0] for text in spilling(reports)] == (["sm_75 _Zother"] if spills else [])


# ---------------------------------------------------------------------------------------------------------------------
# Packaging


def test_sdist_is_complete(tmp_path):
    """All that the build, the tests and a reader need, and nothing that was built."""
    script = f"import setuptools.build_meta as b; print(b.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    folders = ("csrc", "cmake", "strata_ops", "tests", "bench", "docs", ".ci")
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    wanted |= {"CMakeLists.txt", "setup.py", "pyproject.toml", "README.md", "Makefile", "requirements-dev.txt"}
    assert wanted - held == set()
    assert {name for name in held if name.endswith((".so", ".o", ".pyc"))} == set()


@pytest.mark.parametrize("command", ["bdist_wheel", "dist_info"])
def test_without_torch_setup_says_so_in_one_line(command, tmp_path):
    # -S hides site-packages, and torch with it; setuptools comes back by a folder of its own.
    import setuptools

    for name in ("setuptools", "_distutils_hack"):
        (tmp_path / name).symlink_to(Path(setuptools.__file__).parent.parent / name)
    ran = subprocess.run(
        [sys.executable, "-S", "setup.py", command, "-h"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1 and "install torch" in ran.stderr and "--no-build-isolation" in ran.stderr


def test_readme_example_runs():
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    ran = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "torch.Size([2, 2560]) torch.Size([2, 4, 2560])\n"), ran.stderr
