"""Compiles the GPU sources for an AMD card with both compilers, the way the library is compiled, and takes code objects
apart.

clang    what cmake/hip_facts.py finds, with the HIP headers that it finds
llvm24   clang's intermediate code through the AMD backend in Triton's library (STRATA_TRITON names the folder that
         holds the package `triton`; else the installed one)
"""

import functools
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cmake"))
import hip_facts  # noqa: E402

BUILD = Path(os.environ.get("STRATA_ISA_BUILD", ROOT / "build/isa"))
COMPILERS = ("clang", "llvm24")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-ffp-contract=off",
    "-fhip-fp32-correctly-rounded-divide-sqrt",
    "-Wall",
    "-Wextra",
    "-Werror",
    f"-I{ROOT / 'csrc'}",
]


class Unavailable(Exception):
    """A tool that is not here. One line."""


def triton_package() -> Path:
    if folder := os.environ.get("STRATA_TRITON"):
        found = Path(folder) / "triton"
    else:
        spec = importlib.util.find_spec("triton")
        found = Path(spec.origin).parent if spec is not None and spec.origin else Path("/nonexistent")
    if not (found / "_C/libtriton.so").exists():
        raise Unavailable("Triton's library is not here (STRATA_TRITON names a folder that holds the package `triton`)")
    return found


@functools.cache
def hip(new_headers: bool = False) -> hip_facts.Hip:
    """The HIP compiler; with `new_headers`, with the HIP 7 headers that Triton brings."""
    before = os.environ.get("STRATA_HIP_HEADERS")
    if new_headers:
        os.environ["STRATA_HIP_HEADERS"] = str(triton_package() / "backends/amd")
    try:
        return hip_facts.find_hip(BUILD / "bitcode")
    except hip_facts.Missing as reason:
        raise Unavailable(str(reason)) from None
    finally:
        if new_headers:
            del os.environ["STRATA_HIP_HEADERS"]
            if before is not None:
                os.environ["STRATA_HIP_HEADERS"] = before


@functools.cache
def llvm24() -> ModuleType:
    """Triton's library, loaded by itself: nothing else of Triton is needed."""
    spec = importlib.util.spec_from_file_location("libtriton", triton_package() / "_C/libtriton.so")
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    library.llvm.init_targets()
    return library.llvm


def run(command: list[str]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[-4000:]}")
    return done.stdout


def llvm_tool(name: str) -> str:
    """A tool of the compiler's own LLVM."""
    compiler = Path(hip().compiler[0]).resolve()
    suffix = re.search(r"-\d+$", compiler.name)
    for candidate in (compiler.parent / name, shutil.which(name + (suffix[0] if suffix else "")), shutil.which(name)):
        if candidate and Path(candidate).exists():
            return str(candidate)
    raise Unavailable(f"{name} is not here")


def newest(paths: list[Path]) -> float:
    return max(path.stat().st_mtime for path in paths)


def is_current(target: Path, sources: list[Path]) -> bool:
    return target.exists() and target.stat().st_mtime > newest(sources)


def gpu_sources() -> list[Path]:
    """What any result here depends on."""
    found = [path for folder in ("csrc/gpu", "csrc/common") for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [*found, Path(__file__), Path(hip_facts.__file__)]


def compile_device(source: Path, arch: str, kind: str, new_headers: bool = False) -> Path:
    """The device code of one source: kind "s" for assembly, "ll" for LLVM's language."""
    target = BUILD / ("hip7" if new_headers else "hip") / f"{source.stem}.{arch}.{kind}"
    if not is_current(target, [source, *gpu_sources()]):
        target.parent.mkdir(parents=True, exist_ok=True)
        how = ["-S"] if kind == "s" else ["-S", "-emit-llvm"]
        flags = [*FLAGS, f"--offload-arch={arch}", "--offload-device-only", '-DSTRATA_BUILT_FOR="isa"']
        run([*hip(new_headers).compiler, *flags, *how, source, "-o", target])
    return target


def assembly(source: Path, arch: str, compiler: str) -> str:
    if compiler == "clang":
        return compile_device(source, arch, "s").read_text()
    return translate(compile_device(source, arch, "ll"), arch, is_object=False)


def translate(source: Path, arch: str, is_object: bool):
    """LLVM 24's answer to intermediate code. A compiler's own pipeline finds out first which pointers are to global
    memory; LLVM 24 does it in a part that Triton's library does not offer for text, so clang's LLVM does it here."""
    passes = "function(amdgpu-promote-kernel-arguments,infer-address-spaces)"
    text = run([llvm_tool("opt"), "-S", f"-mcpu={arch}", f"-passes={passes}", source, "-o", "-"])
    return llvm24().translate_to_asm(text, "amdgcn-amd-amdhsa", arch, "", [], False, is_object, False)


def llvm24_code_object(source: Path, arch: str) -> bytes:
    """`source` compiled and linked to what a runtime loads, by LLVM 24's backend."""
    target = BUILD / "llvm24" / f"{source.stem}.{arch}.co"
    if not is_current(target, [source, *gpu_sources()]):
        target.parent.mkdir(parents=True, exist_ok=True)
        item = target.with_suffix(".o")
        item.write_bytes(translate(compile_device(source, arch, "ll"), arch, is_object=True))
        run([llvm_tool("ld.lld"), "-shared", item, "-o", target])
    return target.read_bytes()


def bundled_code_objects(bundle: bytes) -> dict[str, bytes]:
    """Processor -> code object, of clang's uncompressed bundle."""
    magic = b"__CLANG_OFFLOAD_BUNDLE__"
    if not bundle.startswith(magic):
        raise ValueError("not an uncompressed offload bundle")
    (count,) = struct.unpack_from("<Q", bundle, len(magic))
    at, found = len(magic) + 8, {}
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", bundle, at)
        target = bundle[at + 24 : at + 24 + length].decode()
        at += 24 + length
        if "amdgcn" in target:
            found[target.rsplit("--", 1)[-1]] = bundle[offset : offset + size]
    return found


def bundle_size(head: bytes) -> int:
    """Bytes of the bundle whose first bytes are `head`."""
    (count,) = struct.unpack_from("<Q", head, 24)
    at, end = 32, 0
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", head, at)
        at += 24 + length
        end = max(end, offset + size)
    return end


class Segment(NamedTuple):
    offset: int
    address: int
    file_bytes: int
    memory_bytes: int
    executable: bool


class Elf:
    """As much of an AMD code object as loading it takes."""

    def __init__(self, data: bytes):
        self.data = data
        program_at, section_at = struct.unpack_from("<QQ", data, 32)
        program_count, _, section_count = struct.unpack_from("<HHH", data, 56)
        headers = [struct.unpack_from("<IIQQQQQQ", data, program_at + 56 * i) for i in range(program_count)]
        self.segments = [Segment(h[2], h[3], h[5], h[6], bool(h[1] & 1)) for h in headers if h[0] == 1]
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_at + 64 * i) for i in range(section_count)]
        self.symbols: dict[str, int] = {}
        for section in sections:
            kind, offset, size, link = section[1], section[4], section[5], section[6]
            if kind in (4, 9) and size:
                raise ValueError("the code object has relocations, which this loader does not apply")
            if kind != 11:  # .dynsym
                continue
            names = sections[link][4]
            for i in range(size // 24):
                name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, offset + 24 * i)
                end = data.index(b"\0", names + name)
                self.symbols[data[names + name : end].decode()] = value

    @property
    def text(self) -> bytes:
        return b"".join(self.data[s.offset : s.offset + s.file_bytes] for s in self.segments if s.executable)
