"""Executes AMD code objects, instruction by instruction, on tinygrad's emulator (STRATA_TINYGRAD: its source tree).

The emulator gives a function for each instruction; card.cpp calls them. What it does not have: caches, waits and timing
(every load has arrived when the next instruction runs), so it proves results, not schedules. Two things are ours: the
floating-point mode is the kernels' own (the emulator flushes subnormal numbers), and whatever the hardware leaves
undefined (registers, shared memory) is filled with NaNs first.
"""

import ctypes
import mmap
import os
import struct
import sys
from pathlib import Path

from codegen import Elf, Unavailable, hip

POISON = 0x7FADBEEF
FIRST_FREE_SCALAR = 8  # in front of it the arguments' address and the block's number
CACHE_CONTROL = ("GLOBAL_WB", "GLOBAL_INV", "BUFFER_WB", "BUFFER_INV", "BUFFER_GL", "S_DCACHE", "S_ICACHE")
S_NOP = 0xBF800000
MAP_NORESERVE = 0x4000


def load_tinygrad():
    folder = os.environ.get("STRATA_TINYGRAD")
    if not folder:
        raise Unavailable("STRATA_TINYGRAD does not name tinygrad's source tree, whose emulator runs the instructions")
    if not (Path(folder) / "test/mockgpu/amd/emu.py").exists():
        raise Unavailable(f"STRATA_TINYGRAD={folder} holds no test/mockgpu/amd/emu.py")
    # It compiles its functions by calling `clang`.
    os.environ["PATH"] = f"{Path(hip().compiler[0]).resolve().parent}{os.pathsep}{os.environ['PATH']}"
    # Its tests are a package called `test`, like Python's own.
    for name in [name for name in sys.modules if name == "test" or name.startswith("test.")]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        from test.mockgpu.amd import emu
    finally:
        sys.path.remove(folder)
    emu._get_ftz_lib = lambda: (None, 0)
    return emu


class Step(ctypes.Structure):
    _fields_ = [("function", ctypes.c_void_p), ("arguments", ctypes.c_ubyte * 6), ("stops", ctypes.c_ubyte)]


def whole_range() -> mmap.mmap:
    """Zeros for every 32-bit address, which take memory only where they are touched: the emulator also reads for lanes
    that are masked out, at whatever addresses their registers hold."""
    return mmap.mmap(-1, (1 << 32) + (1 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)


class Kernel:
    def __init__(self, descriptor: bytes):
        self.shared_bytes, self.private_bytes, self.argument_bytes = struct.unpack_from("<III", descriptor, 0)
        (self.entry,) = struct.unpack_from("<q", descriptor, 16)
        self.resources1, self.resources2, properties = struct.unpack_from("<IIH", descriptor, 48)
        # In front of the kernel's own registers: the pointer to its arguments and nothing else.
        if properties & 0x7F != 0x08:
            raise ValueError(f"a kernel wants more than its arguments' address: {properties:#x}")


class CodeObject:
    """A loaded code object and what was learned of its instructions."""

    def __init__(self, emu, library, data: bytes, arch: str):
        self.emu, self.library = emu, library
        elf = Elf(data)
        self.wave = 64 if arch.startswith("gfx9") else 32
        self.arch = "cdna" if self.wave == 64 else "rdna4" if arch.startswith("gfx12") else "rdna3"
        size = max(s.address + s.memory_bytes for s in elf.segments)
        self.memory = ctypes.create_string_buffer(size + 4096)
        self.base = (ctypes.addressof(self.memory) + 4095) & ~4095
        for s in elf.segments:
            ctypes.memmove(self.base + s.address, data[s.offset : s.offset + s.file_bytes], s.file_bytes)
        code = next(s for s in elf.segments if s.executable)
        self.first, self.bytes = self.base + code.address, code.memory_bytes
        self.steps = (Step * (self.bytes // 4))()
        self.kernels = {
            name[:-3]: (Kernel(ctypes.string_at(self.base + at, 64)), self.base + at)
            for name, at in elf.symbols.items()
            if name.endswith(".kd")
        }
        self.keep = []
        self.shared = whole_range()
        self.registers = [whole_range() for _ in range(1024 // self.wave)]
        self.executed = ctypes.c_uint64()

    def _learn(self, at: int) -> None:
        """Makes the instruction at an address known."""
        emu = self.emu
        instruction = emu.decode_inst(ctypes.string_at(at, 16), self.arch)
        name = emu._op_name(instruction)
        if name.startswith(CACHE_CONTROL):  # nothing to do where there are no caches
            for word in range(instruction.size() // 4):
                ctypes.memmove(at + 4 * word, struct.pack("<I", S_NOP), 4)
        (program, runtime), instruction = emu._decode_at(at, self.arch)
        step = self.steps[(at - self.first) // 4]
        for i, which in enumerate(program.arg.globals):
            step.arguments[i] = which
        op = getattr(instruction, "op", None)
        step.stops = op in emu._BARRIER_OPS or op in emu._BARRIER_SOP1_OPS
        step.function = ctypes.cast(runtime.fxn, ctypes.c_void_p).value
        self.keep.append(runtime)

    def launch(self, name: str, grid, block, shared_bytes: int, arguments: bytes, backwards: bool = False) -> None:
        """Runs a kernel to its end. `backwards` lets the last wave of a block go first after every barrier."""
        emu = self.emu
        kernel, descriptor = self.kernels[name]
        if kernel.private_bytes:
            raise ValueError(f"{name} has scratch")
        # Code object version 5: behind the kernel's own arguments the grid and the block, which blockDim reads.
        hidden = struct.pack("<III3H3H", *grid, *block, 0, 0, 0) + bytes(40 - 24) + bytes(24) + struct.pack("<H", 3)
        explicit = (len(arguments) + 7) & ~7
        packed = (arguments + bytes(explicit - len(arguments)) + hidden).ljust(kernel.argument_bytes + 256, b"\0")
        storage = ctypes.create_string_buffer(len(packed) + 64)
        argument_at = (ctypes.addressof(storage) + 63) & ~63
        ctypes.memmove(argument_at, packed, len(packed))

        shared_bytes += kernel.shared_bytes
        shared = (ctypes.c_uint32 * max(1, shared_bytes // 4)).from_buffer(self.shared)
        threads = block[0] * block[1] * block[2]
        entry = descriptor + kernel.entry
        counter, end = emu.PC_LO_IDX, emu.ENDPGM_PC
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    ctypes.memmove(shared, struct.pack("<I", POISON) * len(shared), ctypes.sizeof(shared))
                    waves = []
                    for number in range((threads + self.wave - 1) // self.wave):
                        state = emu._init_wave(
                            entry, number * self.wave, threads, *block, argument_at, kernel.resources2, 0, self.arch,
                            x, y, z, None, self.wave,
                        )  # fmt: skip
                        waves.append((state, self._buffers(state, shared, number)))
                    self._run_block(waves[::-1] if backwards else waves, counter, end, name)

    def _buffers(self, state, shared, number: int):
        """What the wave's functions are given, with NaNs wherever a kernel may not rely on anything."""
        bytes_each = 4 * self.wave
        poison = struct.pack("<I", POISON)
        vector = ctypes.addressof(ctypes.c_char.from_buffer(self.registers[number]))
        ctypes.memmove(vector, state.vgpr_buf._buf.va_addr, bytes_each)  # the thread's number
        ctypes.memmove(vector + bytes_each, poison * (255 * self.wave), 255 * bytes_each)
        scalar = state.sgpr_buf._buf.va_addr
        ctypes.memmove(
            scalar + 4 * FIRST_FREE_SCALAR, poison * (102 - FIRST_FREE_SCALAR), 4 * (102 - FIRST_FREE_SCALAR)
        )
        accumulators = state.accvgpr_buf._buf.va_addr if self.wave == 64 else vector
        addresses = (scalar, vector, 0, ctypes.addressof(shared), 0, accumulators)  # 0: the process's own memory
        return (ctypes.c_void_p * 6)(*addresses)

    def _run_block(self, waves, counter, end, name) -> None:
        done, barrier, unknown = 0, 1, 2
        running = list(waves)
        while running:
            left = []
            for state, buffers in running:
                while True:
                    stop = self.library.card_run_wave(
                        self.steps, ctypes.c_uint64(self.first), ctypes.c_uint64(self.bytes), buffers, counter,
                        ctypes.c_uint64(end), ctypes.byref(self.executed),
                    )  # fmt: skip
                    if stop != unknown:
                        break
                    self._learn(state.pc)
                if stop == barrier:
                    left.append((state, buffers))
                elif stop != done:
                    raise RuntimeError(f"{name} did not end")
            running = left
