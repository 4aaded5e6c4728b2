"""What CMake and the tests must know of the HIP compiler here, one `key=value` a line.

Three kinds of machine have one: a ROCm install (its hipcc), Debian's packages (clang with the headers, runtime and
device libraries of HIP 5.2), and Debian's hipcc with a clang behind it. Debian's device libraries are older than new
cards; all that a newer card lacks there is a file of one constant, its ISA version, which is made here from its name.

The environment decides where it says something:
  HIPCXX              the compiler, a hipcc or a clang++
  ROCM_PATH           the ROCm install
  STRATA_HIP_HEADERS  a folder whose include/ has other HIP headers; for a clang++ alone
  PYTORCH_ROCM_ARCH   the cards to compile for, as torch reads it
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

DEFAULT_ARCHS = ("gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1200", "gfx1201")
DEVICE_LIBRARIES = ("lib/x86_64-linux-gnu/amdgcn/bitcode", "lib/aarch64-linux-gnu/amdgcn/bitcode", "lib/amdgcn/bitcode")


class Missing(Exception):
    """There is no HIP compiler here. One line."""


class Refused(Exception):
    """There is one, and it cannot do what is asked. One line."""


class Hip(NamedTuple):
    compiler: list[str]  # the command, without sources and cards
    version: str  # as the compiler tells it
    headers: str  # HIP's version, "7.1"


def run(command: list[str], text: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(command, input=text, capture_output=True, text=True, errors="replace")


def _candidates() -> list[str]:
    if os.environ.get("HIPCXX"):
        return shlex.split(os.environ["HIPCXX"])[:1]
    roots = [os.environ[name] for name in ("ROCM_PATH", "HIP_PATH") if os.environ.get(name)] + ["/opt/rocm"]
    # Debian's hipcc comes last: by itself it starts a clang that is too old for our cards.
    clangs = [f"clang++-{version}" for version in range(30, 17, -1)]
    return [f"{root}/bin/hipcc" for root in roots] + clangs + ["clang++", "hipcc"]


def _device_libraries() -> Path | None:
    found = [Path("/usr") / folder for folder in DEVICE_LIBRARIES if (Path("/usr") / folder / "ocml.bc").exists()]
    return found[0] if found else None


def _complete_device_libraries(compiler: str, installed: Path, folder: Path) -> None:
    """Fills `folder` with links to the installed device libraries and with the ISA versions that they lack."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in installed.glob("*.bc"):
        link = folder / path.name
        if not link.is_symlink() or link.resolve() != path.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    for arch in {*DEFAULT_ARCHS, *(name.split(":")[0] for name in asked_archs())}:
        digits = re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", arch)
        target = folder / f"oclc_isa_version_{arch[3:]}.bc"
        if digits is None or target.exists():
            continue
        number = int(digits[1]) * 1000 + int(digits[2], 16) * 100 + int(digits[3], 16)
        source = (
            '__attribute__((address_space(4), weak, visibility("protected"))) '
            f"const int __oclc_ISA_version = {number};\n"
        )
        flags = "-x c --target=amdgcn-amd-amdhsa -nogpulib -Xclang -mcode-object-version=none -O1 -c -emit-llvm"
        run([compiler, *flags.split(), "-", "-o", str(target)], source)  # where it fails, the probe below says so


def _headers_version(root: Path) -> list[str]:
    """["7", "1", "0"], of the headers in root/include."""
    path = root / "include/hip/hip_version.h"
    text = path.read_text() if path.exists() else ""
    return re.findall(r"#define HIP_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", text)[:3]


def _command(compiler: str, bitcode: Path) -> list[str]:
    """`compiler` with what it needs to find headers and device libraries."""
    command = [compiler, "-x", "hip"]
    if "hipcc" in Path(compiler).name:
        # It asks the environment, and takes itself for NVIDIA's where there is an nvcc and no AMD card.
        told = ["HIP_PLATFORM=amd"]
        if folder := os.environ.get("HIP_CLANG_PATH"):
            told.append(f"HIP_CLANG_PATH={folder}")
            clang, installed = next(iter(sorted(Path(folder).glob("clang*"))), None), _device_libraries()
            if clang is not None and installed is not None and Path(compiler).parent == Path("/usr/bin"):  # Debian's
                _complete_device_libraries(str(clang), installed, bitcode)
                command.append(f"--rocm-device-lib-path={bitcode}")
        return ["env", *told, *command]
    root = os.environ.get("STRATA_HIP_HEADERS") or os.environ.get("ROCM_PATH") or "/usr"
    command.append(f"--rocm-path={root}")
    if root != "/usr":
        # Clang puts the headers of --rocm-path behind /usr/include, where others may be, and takes HIP for an old one
        # where a file that a ROCm install has beside its headers is missing.
        command += ["-isystem", f"{root}/include", f"--hip-version={'.'.join(_headers_version(Path(root)))}"]
    if installed := _device_libraries():
        _complete_device_libraries(compiler, installed, bitcode)
        command.append(f"--rocm-device-lib-path={bitcode}")
    return command


def find_hip(bitcode: Path) -> Hip:
    """The first compiler here that compiles HIP. `bitcode` is a folder for device libraries that must be completed."""
    tried = []
    for candidate in _candidates():
        compiler = shutil.which(candidate)
        if compiler is None:
            continue
        command = _command(compiler, bitcode)
        source = "#include <hip/hip_version.h>\n@HIP_VERSION_MAJOR.HIP_VERSION_MINOR\n"
        said = run([*command, "--offload-arch=gfx90a", "--offload-host-only", "-E", "-"], source)
        version = re.search(r"^@\s*(\d+)\s*\.\s*(\d+)", said.stdout, re.M)
        if said.returncode != 0 or version is None:
            reason = [line for line in said.stderr.splitlines() if "error" in line] or ["no hip/hip_version.h"]
            tried.append(f"{candidate}: {reason[0]}")
            continue
        lines = [line for line in run([compiler, "--version"]).stdout.splitlines() if "version" in line.lower()]
        return Hip(command, lines[-1].strip() if lines else "unknown", f"{version[1]}.{version[2]}")
    raise Missing("no compiler here takes HIP" + (f" ({'; '.join(tried)})" if tried else ": no hipcc, no clang++"))


def asked_archs() -> list[str]:
    return re.findall(r"[^\s;,]+", os.environ.get("PYTORCH_ROCM_ARCH", ""))


def knows(hip: Hip, arch: str) -> bool:
    """Whether the compiler has the card and its device libraries."""
    kernel = "__attribute__((global)) void k(float* x) { *x = 1; }\n"
    flags = [f"--offload-arch={arch}", "--offload-device-only", "-c", "-o", os.devnull, "-"]
    return run([*hip.compiler, *flags], kernel).returncode == 0


def archs(hip: Hip) -> tuple[list[str], list[str]]:
    """The cards to compile for, and those of our own list that this compiler does not know."""
    asked = list(dict.fromkeys(asked_archs()))
    known = {
        arch: re.match(r"gfx[0-9a-f]+\b", arch) is not None and knows(hip, arch) for arch in asked or DEFAULT_ARCHS
    }
    unknown = [arch for arch, good in known.items() if not good]
    if asked and unknown:
        names = ", ".join(f"'{arch}'" for arch in unknown)
        raise Refused(f"PYTORCH_ROCM_ARCH: {names} (write gfx1201 or gfx942:xnack-, and "
                      f"know that {hip.version} takes no others)")  # fmt: skip
    return [arch for arch, good in known.items() if good], unknown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bitcode", type=Path, required=True, help="a folder for completed device libraries")
    args = parser.parse_args()
    try:
        hip = find_hip(args.bitcode)
        known, unknown = archs(hip)
    except Missing as reason:
        print(f"missing={reason}")
        return 0
    except Refused as reason:
        print(reason, file=sys.stderr)
        return 1
    print(f"compiler={';'.join(hip.compiler)}")
    print(f"version={hip.version}")
    print(f"headers={hip.headers}")
    print(f"archs={';'.join(known)}")
    print(f"unknown={';'.join(unknown)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
