"""The HIP build: the compiler that is found, the names that are used, what the sources become under old and new HIP
headers, and the built library on a machine without a card. Nothing here needs an AMD GPU."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/isa"))
import codegen  # noqa: E402

VENDOR = ROOT / "csrc/gpu/vendor"
SOURCES = sorted((ROOT / "csrc/gpu").glob("*.cu"))
BUILT = [ROOT / "build/libstrata_hip.so", ROOT / "strata_ops/lib/libstrata_hip.so"]


def unavailable(reason) -> None:
    """A part that cannot be tested here: an error where all parts are asked for."""
    if os.environ.get("STRATA_REQUIRE_ALL"):
        pytest.fail(f"{reason}, and STRATA_REQUIRE_ALL is set")
    pytest.skip(str(reason))


def have(function, *arguments):
    try:
        return function(*arguments)
    except codegen.Unavailable as reason:
        unavailable(reason)


# ---------------------------------------------------------------------------------------------------------------------
# Names


def spelled(path: Path, prefix: str) -> set[str]:
    """The runtime's names in a vendor header, those of the table of error codes included."""
    text = re.sub(r"//.*", "", path.read_text())
    codes = re.findall(r"STRATA_CODE\(\d+, (\w+)\)", text)
    return set(re.findall(rf"\b{prefix}[A-Z]\w+", text)) | {prefix + name for name in codes}


def codes(path: Path) -> dict[str, int]:
    return {name: int(number) for number, name in re.findall(r"STRATA_CODE\((\d+), (\w+)\)", path.read_text())}


# Where torch's map has another name for the same thing, or none.
SAME_CODE = {
    "cudaErrorDeviceUninitialized": "hipErrorInvalidContext",
    "cudaErrorInitializationError": "hipErrorNotInitialized",
    "cudaErrorInvalidResourceHandle": "hipErrorInvalidHandle",
    "cudaErrorMemoryAllocation": "hipErrorOutOfMemory",
    "cudaErrorSymbolNotFound": "hipErrorNotFound",
    # HIP means something else by 911 and 912; the policy's table knows.
    "cudaErrorExternalDevice": "hipErrorInvalidChannelDescriptor",
    "cudaErrorInvalidClusterSize": "hipErrorInvalidTexture",
}
# Codes that HIP does not have (for some of them torch's map makes up a name that is in no HIP header), the launch that
# may begin before the one ahead of it has ended, and clusters.
NVIDIA_ONLY = {
    "cudaErrorContained", "cudaErrorHardwareStackError", "cudaErrorIllegalInstruction", "cudaErrorInvalidAddressSpace",
    "cudaErrorInvalidPc", "cudaErrorMisalignedAddress", "cudaErrorMpsClientTerminated", "cudaErrorTensorMemoryLeak",
    "cudaSharedmemCarveoutMaxShared",
    "cudaLaunchAttribute", "cudaLaunchAttributeProgrammaticStreamSerialization", "cudaLaunchConfig_t",
    "cudaLaunchKernelExC", "cudaLaunchAttributeClusterDimension", "cudaOccupancyMaxActiveClusters",
    "cudaDriverEntryPointQueryResult", "cudaDriverEntryPointSuccess", "cudaEnableDefault",
    "cudaGetDriverEntryPointByVersion",
}  # fmt: skip
AMD_ONLY = {"hipErrorRuntimeMemory", "hipErrorRuntimeOther"}


@functools.cache
def hipify_map() -> dict[str, set[str]]:
    from torch.utils.hipify import cuda_to_hip_mappings

    found: dict[str, set[str]] = {}
    for table in cuda_to_hip_mappings.CUDA_TO_HIP_MAPPINGS:
        for cuda, hip in table.items():
            found.setdefault(cuda, set()).add(hip if isinstance(hip, str) else hip[0])
    return found


def test_each_cuda_name_stands_beside_its_hip_name():
    """Nothing is translated here, so nobody else would notice a call that only one of the two headers has. Torch's own
    map for hipify is the witness; SAME_CODE and NVIDIA_ONLY are all that it does not say or says otherwise."""
    cuda, hip = spelled(VENDOR / "cuda.hpp", "cuda"), spelled(VENDOR / "hip.hpp", "hip")
    assert len(cuda) > 80 and len(hip) > 75
    met = set()
    for name in sorted(cuda - NVIDIA_ONLY):
        expected = {SAME_CODE[name]} if name in SAME_CODE else hipify_map().get(name, {"hip" + name[4:]})
        assert expected & hip, f"{name} is {' or '.join(sorted(expected))} to torch, which hip.hpp does not have"
        met |= expected & hip
    assert hip - met == AMD_ONLY


def test_codes_have_the_same_numbers():
    cuda, hip = codes(VENDOR / "cuda.hpp"), codes(VENDOR / "hip.hpp")
    pairs = {"cuda" + name: number for name, number in cuda.items() if "cuda" + name not in NVIDIA_ONLY}
    for name, number in pairs.items():
        mapped = SAME_CODE.get(name) or next(iter(hipify_map().get(name, {"hip" + name[4:]})))
        assert hip[mapped[3:]] == number, name


def test_no_other_file_names_a_vendor():
    """Everything else in csrc is the same text for every card."""
    pattern = re.compile(r"\b(cuda|hip)[A-Z]\w+|\b__(shfl|ballot|any|all|activemask|syncwarp)\w*|\bwarpSize\b")
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".cu", ".cuh", ".cpp", ".hpp") and pattern.search(re.sub(r"//.*", "", path.read_text()))
    }
    assert {name for name in found if not name.startswith(("csrc/gpu/vendor/", "csrc/sim/"))} == set()


def header_text(root: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in (root / "include/hip").rglob("*.h*"))


@functools.cache
def old_headers() -> str:
    if not Path("/usr/include/hip/hip_version.h").exists():
        raise codegen.Unavailable("the HIP 5 headers are not here (Debian: libamdhip64-dev)")
    return header_text(Path("/usr"))


@functools.cache
def new_headers() -> str:
    return header_text(codegen.triton_package() / "backends/amd")


def missing_names(names: set[str], text: str) -> set[str]:
    return {name for name in names if not re.search(rf"\b{name}\b", text)}


def test_every_hip_name_is_in_both_headers():
    names = spelled(VENDOR / "hip.hpp", "hip")
    # HIP 5.2 has no names for these two codes, and hip.hpp asks for them only where it is newer.
    assert missing_names(names, have(old_headers)) == {"hipErrorInvalidChannelDescriptor", "hipErrorInvalidTexture"}
    assert missing_names(names, have(new_headers)) == set()


def test_every_symbol_that_the_library_needs_is_in_both_headers():
    library = built_library()
    said = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    symbols = {re.split("@|R0600", line.split()[-1])[0] for line in said.splitlines() if re.search(r"U _*hip", line)}
    assert {"hipLaunchKernel", "hipGetDeviceProperties", "__hipRegisterFatBinary"} <= symbols
    # What the compiler calls by itself to register kernels is declared in no header; the new ones list it in a table.
    implicit = {name for name in symbols if name.startswith("__hip") and name.endswith(("Binary", "Function"))}
    assert {name for name in implicit if f"{name}_fn" not in have(new_headers)} == set()
    assert missing_names(symbols - implicit, have(old_headers)) == set()
    assert missing_names(symbols - implicit, have(new_headers)) == set()


def test_a_missing_name_is_seen():
    assert missing_names({"hipMalloc", "hipMallocked"}, "hipError_t hipMalloc(void**, size_t);") == {"hipMallocked"}


# ---------------------------------------------------------------------------------------------------------------------
# The compiler


def facts(tmp_path, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "cmake/hip_facts.py", "--bitcode", tmp_path]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_cards_that_do_not_exist_are_named_in_one_line(tmp_path):
    have(codegen.hip)
    said = facts(tmp_path, PYTORCH_ROCM_ARCH="gfx1201;gfx9999 sm_90,gfx942:xnack-")
    assert said.returncode == 1 and said.stdout == ""
    assert said.stderr.count("\n") == 1
    assert said.stderr.startswith("PYTORCH_ROCM_ARCH: 'gfx9999', 'sm_90' (")


def test_the_list_of_cards_is_honoured(tmp_path):
    have(codegen.hip)
    said = facts(tmp_path, PYTORCH_ROCM_ARCH="gfx1201;gfx942:xnack-")
    assert "archs=gfx1201;gfx942:xnack-\n" in said.stdout


def test_without_a_compiler_it_says_so(tmp_path):
    said = facts(tmp_path, HIPCXX="no-such-compiler", PATH="/nonexistent")
    assert (said.returncode, said.stdout.splitlines()[0][:8]) == (0, "missing=")


def test_debian_hipcc_with_a_newer_clang_compiles(tmp_path):
    """Debian's hipcc calls its clang by the version that it was packaged with, in the folder HIP_CLANG_PATH."""
    have(codegen.hip)
    hipcc = Path("/usr/bin/hipcc.pl")
    if not hipcc.exists():
        unavailable("Debian's hipcc is not here")
    clang = Path(codegen.hip().compiler[0]).resolve()
    name = re.search(r"clang-\d+", hipcc.read_text())
    (tmp_path / (name[0] if name else "clang")).symlink_to(clang.with_name("clang"))
    said = facts(
        tmp_path / "bitcode", HIPCXX="/usr/bin/hipcc", HIP_CLANG_PATH=str(tmp_path), PYTORCH_ROCM_ARCH="gfx1201"
    )
    compiler = re.search(r"^compiler=(.*)$", said.stdout, re.M)
    assert compiler, said.stdout + said.stderr
    target = tmp_path / "launch.o"
    flags = [*codegen.FLAGS, "--offload-arch=gfx1201", "-fPIC", "-c", ROOT / "csrc/gpu/launch.cu", "-o", target]
    done = subprocess.run(
        [*compiler[1].split(";"), *flags], capture_output=True, text=True,
        env={**os.environ, "HIP_CLANG_PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"gfx1201" in target.read_bytes()


@pytest.mark.parametrize("headers", ["5", "7"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_sources_compile_without_a_warning(source, headers, tmp_path):
    """All cards, host and device, against both headers. (FLAGS has -Werror.)"""
    hip = have(codegen.hip, headers == "7")
    assert hip.headers.startswith(f"{headers}."), "the headers are not those that were asked for"
    archs, _ = codegen.hip_facts.archs(hip)
    assert {"gfx90a", "gfx942", "gfx1100", "gfx1200", "gfx1201"} <= set(archs)
    offload = [f"--offload-arch={arch}" for arch in archs]
    flags = [*codegen.FLAGS, *offload, "-fPIC", '-DSTRATA_BUILT_FOR="test"']
    target = tmp_path / "object.o"
    codegen.run([*hip.compiler, *flags, "-c", source, "-o", target])
    if source.name == "launch.cu":  # which has the kernels
        assert {f"--{arch}".encode() for arch in archs} <= set(re.findall(rb"--gfx\w+", target.read_bytes()))


def test_old_and_new_headers_give_a_wave_the_same_shuffles():
    """The masked forms and those without a mask become the same instruction."""
    have(codegen.hip, True)
    launch = ROOT / "csrc/gpu/launch.cu"
    for arch in ("gfx1201", "gfx942"):
        counts = set()
        for new in (False, True):
            text = codegen.compile_device(launch, arch, "s", new).read_text()
            assert "s_trap" not in text
            counts.add(len(re.findall(r"ds_bpermute_b32", text)))
        assert len(counts) == 1 and counts.pop() > 100


# ---------------------------------------------------------------------------------------------------------------------
# The library without a card


def built_library() -> Path:
    found = [path for path in BUILT if path.exists()]
    if not found:
        unavailable("the HIP library was not built")
    return found[0]


def test_library_needs_one_runtime_and_no_torch_of_a_vendor():
    said = subprocess.run(["readelf", "-d", built_library()], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", said)
    vendors = [name for name in needed if re.match(r"lib(amdhip|hsa|torch_(hip|cuda)|c10_|cuda|nv)", name)]
    assert len(vendors) == 1 and vendors[0].startswith("libamdhip64.so"), vendors


def test_library_loads_without_a_card_and_says_so():
    """In a process of its own: loading a GPU library registers its kernels."""
    script = f"""
import torch, strata_ops
from strata_ops import _core, _inputs
path = {str(built_library())!r}
torch.ops.load_library(path)
backend = _core.load_backend(path)
print(backend.built_for)
try:
    print(backend.device_count(), "devices")
except RuntimeError as error:
    print(error)
inputs = _inputs.make_inputs(2)
print(strata_ops.fused_gr_read(*inputs).mixed.shape)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    built_for, devices, shape = done.stdout.splitlines()
    assert "gfx1201" in built_for
    assert re.match(r"\d+ devices$|no usable hip device: .+", devices)
    assert shape == "torch.Size([2, 2560])"
