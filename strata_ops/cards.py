"""Simulated cards: the GPU kernels' own source, executed on the CPU for a card that need not be there.

A tool for checking, not for work. A read at the model's geometry takes 0.05 to 0.25 s on a fast card and two to three
times that on a strict one, where every access to memory is looked at and what a real card would let pass is an error:
a race, an access out of bounds, memory that nobody has written, a barrier that part of a block does not reach. The
order of blocks and threads comes from a seed.

A card is a profile's name (`names()`) or "name,lanes,shared bytes,compute units", for example "gfx1250,32,327680,16".
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _core
from ._libraries import LIBRARIES, REBUILD
from .ops import FusedGrRead

FOLDER = Path(__file__).parent / "lib"


class _Report(ctypes.Structure):
    """`strata::Report` of csrc/common/backend.hpp."""

    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 512)]


class _Library(NamedTuple):
    """One of the two libraries: its C functions, and its backend as any other's."""

    c: ctypes.CDLL
    backend: _core.Backend


@functools.cache
def _library(strict: bool) -> _Library:
    path = FOLDER / f"libstrata_sim{'_strict' if strict else ''}.so"
    if not path.exists():
        raise RuntimeError(
            "the simulated cards were left out of this build, since Boost.Context was missing: install it "
            f"(Debian: libboost-context-dev) and {REBUILD}"
        )
    backend = _core.load_backend(str(path))  # which compares the versions of the interface
    backend.set_witness(_core.load_backend(str(LIBRARIES["cpu"].path)))
    c = ctypes.CDLL(str(path))
    c.strata_sim_open.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(_Report)]
    c.strata_sim_open.restype = ctypes.c_int
    c.strata_sim_cards.restype = ctypes.c_char_p
    c.strata_sim_read.argtypes = [
        ctypes.c_int,
        ctypes.c_int64 * 3,
        ctypes.c_int64,
        ctypes.c_float,
        ctypes.c_int,
        ctypes.c_void_p * 14,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.POINTER(_Report),
    ]
    c.strata_sim_read.restype = ctypes.c_bool
    return _Library(c, backend)


def names() -> list[str]:
    """The built-in profiles. RuntimeError where this build has no simulated cards."""
    text: bytes = _library(False).c.strata_sim_cards()
    return text.decode().split(",")


class Card:
    """An opened card: a device of the library's backend, with a seed of its own."""

    def __init__(self, name: str, seed: int = 0, strict: bool = False) -> None:
        self.name, self.seed, self.strict = name, seed, strict
        self._library = _library(strict)
        self._device = self._open()

    def _open(self) -> int:
        report = _Report()
        device: int = self._library.c.strata_sim_open(self.name.encode(), self.seed % 2**64, ctypes.byref(report))
        if device < 0:
            raise RuntimeError(report.text.decode())
        return device

    @property
    def variants(self) -> list[str]:
        return self._library.backend.variants

    @property
    def built_for(self) -> str:
        return self._library.backend.built_for

    def describe(self) -> dict[str, Any]:
        return self._library.backend.describe(self._device)

    def read(
        self,
        residual: Tensor,
        w_norm: Tensor,
        w_down: Tensor,
        w_up: Tensor,
        w_inject: Tensor | None = None,
        block_out: Tensor | None = None,
        inject_prev: Tensor | None = None,
        *,
        eps: float = 1e-6,
        q8_1: bool = False,
        variant: str | None = None,
        q8_columns: int = 0,
    ) -> FusedGrRead:
        """`strata_ops.fused_gr_read` of CPU tensors on this card. RuntimeError, which names kernel, block, thread and
        source line, where a kernel does what the card does not allow; the next read is on a fresh card. Without a
        `variant` the card first goes through the gate like any device, which takes about a minute."""
        inputs = [residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev]
        for name, tensor in zip(_core.ARGUMENTS, inputs, strict=False):
            if tensor is not None and tensor.device.type != "cpu":
                raise RuntimeError(
                    f"fused_gr_read: '{name}' is on {tensor.device}, but a simulated card reads CPU tensors"
                )
        refusal = _core.check_read("functional", [None if t is None else _facts(t) for t in inputs], eps, q8_1)
        if refusal is not None:
            raise RuntimeError(refusal)
        inputs = [None if t is None else _plain(t.detach()) for t in inputs]
        lead, (streams, width), rank = residual.shape[:-2], residual.shape[-2:], w_down.shape[0]
        tokens = lead.numel()
        given = FusedGrRead(
            mixed=torch.empty(*lead, width),
            inject=None if w_inject is None else torch.empty(*lead, streams),
            residual_out=None if block_out is None else torch.empty(*lead, streams, width, dtype=residual.dtype),
            lo=torch.empty(*lead, rank),
            rs=torch.empty(*lead, streams),
            q8_1=torch.empty(*lead, width // _core.Q8_BLOCK, _core.Q8_BYTES, dtype=torch.uint8) if q8_1 else None,
        )
        scratch = torch.empty(self._library.backend.scratch_size(width, streams, rank, tokens), dtype=torch.uint8)
        pointers = (ctypes.c_void_p * 14)(*(None if t is None else t.data_ptr() for t in (*inputs, *given, scratch)))
        report = _Report()
        if not self._library.c.strata_sim_read(
            self._device,
            (ctypes.c_int64 * 3)(width, streams, rank),
            tokens,
            eps,
            _core.STREAM_DTYPES.index(str(residual.dtype)),
            pointers,
            None if variant is None else variant.encode(),
            q8_columns,
            ctypes.byref(report),
        ):
            self._device = self._open()
            text = report.text.decode(errors="replace")
            raise RuntimeError("fused_gr_read: " + text.removeprefix("fused_gr_read: "))
        return given


@functools.cache
def open_card(name: str, seed: int = 0, strict: bool = False) -> Card:
    """The card of this name and seed, opened once a process."""
    return Card(name, seed, strict)


def _facts(t: Tensor) -> _core.Tensor:
    return _core.Tensor(str(t.dtype), t.device.type, t.device.index or 0, list(t.shape), list(t.stride()), t.data_ptr())


def _plain(t: Tensor) -> Tensor:
    """Contiguous, on the boundary that kernels ask for: the tensor itself or a copy."""
    t = t.contiguous()
    return t if t.data_ptr() % _core.ALIGNMENT == 0 else t.clone()
