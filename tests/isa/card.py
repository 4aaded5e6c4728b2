"""The library's host code over card.cpp, with a card that the emulator executes: `Card.read` is a whole read, launched
by csrc/gpu/launch.cu as on a real card."""

import ctypes
import hashlib
from pathlib import Path

import codegen
import torch
from codegen import BUILD, ROOT, Elf
from emulator import CodeObject, load_tinygrad

from strata_ops.reference import Read

ARCHS = ("gfx1201", "gfx1200", "gfx942")
HERE = Path(__file__).resolve().parent
SOURCES = sorted((ROOT / "csrc/gpu").glob("*.cu"))


class ReadArgs(ctypes.Structure):
    """strata::ReadArgs of csrc/common/backend.hpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("width", "streams", "rank", "tokens")),
        ("eps", ctypes.c_float),
        ("stream_type", ctypes.c_int),  # 1: bf16
        *(
            (name, ctypes.c_void_p)
            for name in (
                "residual", "w_norm", "w_down", "w_up", "w_inject", "block_out", "inject_prev", "mixed", "inject",
                "residual_out", "lo", "rs", "q8_1", "scratch",
            )
        ),
    ]  # fmt: skip


class GateAnswer(ctypes.Structure):
    _fields_ = [
        ("cases", ctypes.c_int),
        ("equal", ctypes.c_int),
        ("chosen", ctypes.c_char * 32),
        ("why", ctypes.c_char * 512),
    ]


EXECUTE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint * 3),
    ctypes.POINTER(ctypes.c_uint * 3),
    ctypes.c_uint,
    ctypes.c_void_p,
)


def build(new_headers: bool = False) -> Path:
    """The shared library: host code of csrc/gpu for ARCHS, and card.cpp in the runtime's place."""
    folder = BUILD / ("card7" if new_headers else "card")
    target = folder / "card.so"
    if codegen.is_current(target, [HERE / "card.cpp", *codegen.gpu_sources()]):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    compiler = codegen.hip(new_headers).compiler
    targets = [f"--offload-arch={arch}" for arch in ARCHS]
    flags = [*codegen.FLAGS, "-fPIC", '-DSTRATA_BUILT_FOR="isa"']
    objects = []
    for source in (*SOURCES, HERE / "card.cpp"):
        objects.append(folder / f"{source.stem}.o")
        host = ["--offload-host-only", "-Wno-unused-command-line-argument"] if source.suffix == ".cpp" else []
        codegen.run([*compiler, *targets, *flags, *host, "-c", source, "-o", objects[-1]])
    codegen.run([compiler[0], "-shared", *objects, "-Wl,--no-undefined", "-o", target])
    return target


class Card:
    """One card. `compiler` says whose code it executes: "clang", the code objects inside the library, or "llvm24"."""

    def __init__(self, arch: str, compiler: str, shared_bytes: int = 64 * 1024, backwards: bool = False):
        self.arch, self.compiler, self.backwards = arch, compiler, backwards
        self.library = ctypes.CDLL(str(build()))
        self.library.card_bundle.restype = ctypes.c_void_p
        self.library.card_scratch_size.restype = ctypes.c_int64
        self.library.card_read.restype = ctypes.c_bool
        self.library.card_gate.restype = ctypes.c_bool
        emu = load_tinygrad()
        with_kernels = [data for data in self._code_objects() if Elf(data).text]
        self.objects = [CodeObject(emu, self.library, data, arch) for data in with_kernels]
        self.known: dict[bytes, dict[str, bytes]] = {}
        self.launches: list[str] = []
        self.failure: Exception | None = None
        self._execute = EXECUTE(self._launch)  # kept: the library calls it
        self.shared_bytes = shared_bytes

    def _code_objects(self) -> list[bytes]:
        if self.compiler == "llvm24":
            return [codegen.llvm24_code_object(source, self.arch) for source in SOURCES]
        found = []
        while address := self.library.card_bundle(ctypes.c_size_t(len(found))):
            size = codegen.bundle_size(ctypes.string_at(address, 4096))
            found.append(codegen.bundled_code_objects(ctypes.string_at(address, size))[self.arch])
        return found

    @property
    def executed(self) -> int:
        """Instructions of all waves so far."""
        return sum(code.executed.value for code in self.objects)

    def _launch(self, name, grid, block, shared_bytes, arguments) -> int:
        try:
            self._run(name.decode(), tuple(grid.contents), tuple(block.contents), shared_bytes, arguments)
            return 0
        except Exception as error:
            self.failure = error
            return 1

    def _run(self, name, grid, block, shared_bytes, arguments) -> None:
        code = next(code for code in self.objects if name in code.kernels)
        packed = ctypes.string_at(arguments, self.library.card_argument_bytes())
        self.launches.append(name)
        if not self.tensors:  # memory of the library's own
            code.launch(name, grid, block, shared_bytes, packed, self.backwards)
            return
        # A launch with the same arguments and the same memory has the same result: variants share kernels.
        key = hashlib.sha256(
            repr((name, grid, block, shared_bytes)).encode() + packed + b"".join(self._memory().values())
        ).digest()
        if key in self.known:
            for field, data in self.known[key].items():
                ctypes.memmove(self.tensors[field].data_ptr(), data, len(data))
            return
        before = self._memory()
        code.launch(name, grid, block, shared_bytes, packed, self.backwards)
        self.known[key] = {field: data for field, data in self._memory().items() if data != before[field]}

    def _memory(self) -> dict[str, bytes]:
        return {
            field: ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
            for field, tensor in self.tensors.items()
            if field not in ("w_down", "w_up", "w_inject", "w_norm")
        }

    def _insert(self) -> None:
        self.failure, self.launches = None, []
        self.library.card_insert(
            self.arch.encode(), self.objects[0].wave, ctypes.c_size_t(self.shared_bytes), self._execute
        )

    def gate(self) -> GateAnswer:
        """Runs the library's own self-test here. Once a process: its answer is latched."""
        self.tensors = {}
        self._insert()
        answer, text = GateAnswer(), ctypes.create_string_buffer(512)
        good = self.library.card_gate(ctypes.byref(answer), text, ctypes.c_size_t(len(text)))
        if self.failure is not None:
            raise self.failure
        if not good:
            raise RuntimeError(text.value.decode())
        return answer

    def read(self, inputs, variant: str, *, q8_1: bool = False, q8_columns: int = 0, eps: float = 1e-6) -> Read:
        """A read of CPU tensors (`support.Inputs`). Outputs start as NaNs, so what is not written is seen."""
        tokens, streams, width = inputs.residual.shape
        rank = inputs.w_down.shape[0]
        make = Workspace(self, inputs, q8_1)
        self.tensors = make.tensors
        args = ReadArgs(width, streams, rank, tokens, eps, inputs.residual.dtype == torch.bfloat16)
        for field, tensor in self.tensors.items():
            setattr(args, field, tensor.data_ptr())
        text = ctypes.create_string_buffer(512)
        self._insert()
        good = self.library.card_read(
            ctypes.byref(args), variant.encode(), q8_columns, text, ctypes.c_size_t(len(text))
        )
        if self.failure is not None:
            raise self.failure
        if not good:
            raise RuntimeError(text.value.decode())
        return Read(*(self.tensors.get(name) for name in Read._fields))


class Workspace:
    """Copies of the inputs, and outputs full of NaNs, at the same addresses for the same shapes: launches repeat."""

    kept: dict[tuple, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self, card: Card, inputs, q8_1: bool):
        tokens, streams, width = inputs.residual.shape
        rank = inputs.w_down.shape[0]
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensor in inputs._asdict().items():
            if tensor is not None:
                self._place(name, tensor.shape, tensor.dtype).copy_(tensor)
        shapes = {
            "mixed": (tokens, width),
            "lo": (tokens, rank),
            "rs": (tokens, streams),
            "inject": (tokens, streams) if inputs.w_inject is not None else None,
            "residual_out": (tokens, streams, width) if inputs.block_out is not None else None,
        }
        for name, shape in shapes.items():
            if shape is not None:
                dtype = inputs.residual.dtype if name == "residual_out" else torch.float32
                self._place(name, shape, dtype).fill_(torch.nan)
        if q8_1:
            self._place("q8_1", (tokens, width // 32, 36), torch.uint8).fill_(0xA5)
        geometry = (ctypes.c_int64 * 3)(width, streams, rank)
        size = card.library.card_scratch_size(ctypes.byref(geometry), ctypes.c_int64(tokens))
        self._place("scratch", (size // 4,), torch.float32).fill_(torch.nan)

    def _place(self, name: str, shape, dtype) -> torch.Tensor:
        key = (name, tuple(shape), dtype)
        if key not in self.kept:
            self.kept[key] = torch.empty(tuple(shape), dtype=dtype)
        self.tensors[name] = self.kept[key]
        return self.kept[key]
