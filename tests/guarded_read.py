"""Run by test_process.py in a process of its own: reads whose tensors touch memory that nobody may touch.

Every input and every buffer of .out lies at the very end (then at the very start) of its own mapping, and the page
after (before) it may be neither read nor written: a read one byte outside kills the process.
"""

import ctypes
import mmap
import sys

import torch

from strata_ops.reference import read_exact
from support import MODEL, assert_same, make_inputs, named, runners

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE
PROT_NONE = 0


def guarded(t, at_end):
    """A copy between two forbidden pages: its last byte (but for alignment to 16) beside one, or its first."""
    size = -(-t.nbytes // 16) * 16
    pages = -(-size // PAGE) + 2
    protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, pages * PAGE, protection, kind, -1, 0)
    assert start not in (None, ctypes.c_void_p(-1).value)
    for page in (0, pages - 1):
        assert libc.mprotect(start + page * PAGE, PAGE, PROT_NONE) == 0
    place = start + (pages - 1) * PAGE - size if at_end else start + PAGE
    if not size:
        return t.clone()
    raw = (ctypes.c_char * (t.nbytes)).from_address(place)
    return torch.frombuffer(raw, dtype=t.dtype).view(t.shape).copy_(t)


def main():
    if sys.argv[1:] == ["--touch"]:  # that the guard is one: this must not survive
        print(ctypes.string_at(guarded(torch.zeros(16), at_end=True).data_ptr() + 64, 1))
    reads = [(MODEL, 1), (MODEL, 5), ((32, 1, 8), 4), ((96, 3, 24), 3), ((1056, 2, 264), 2)]
    reads = [(*read, False) for read in reads] + [(MODEL, 3, True), ((96, 3, 24), 3, True)]
    for geometry, tokens, bf16 in reads:
        plain = make_inputs(geometry, tokens)
        plain = plain.bf16_streams() if bf16 else plain
        exact = read_exact(*plain, q8_1=True)
        for at_end in (True, False):
            inputs = plain.map(lambda t: guarded(t, at_end))  # noqa: B023
            for runner in runners():
                if runner.device == "cpu":
                    assert_same(runner(inputs, q8_1=True), exact, str(runner))
            out = {name: guarded(t, at_end) for name, t in exact._asdict().items()}
            out["q8_1_out"] = out.pop("q8_1")
            torch.ops.strata.fused_gr_read.out(*inputs, q8_1=True, **out)
            assert_same(named(out.values()), exact, "out")
            stream = guarded(plain.residual, at_end)
            five = torch.ops.strata.fused_gr_read_(stream, *inputs[1:], q8_1=True)
            assert_same(named(five, stream), exact, "in place")
    print("nothing touched")


if __name__ == "__main__":
    main()
