"""Forced variants: the one way round the choice and the gate of `strata_ops.fused_gr_read`.

UNTESTED AND UNSUPPORTED for anything but tests, parity and benchmarks: what is named here runs even where the
self-test has found that variant wrong on this card.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import cards
from ._libraries import backend_of
from .ops import FusedGrRead

_read_variant = torch.ops.strata._fused_gr_read_variant.default


def variants(device: torch.device | str = "cpu", *, card: str | None = None) -> list[str]:
    """The names that `variant` takes on a device, or on a simulated card. RuntimeError where it has no backend."""
    return backend_of(device).variants if card is None else cards.open_card(card).variants


def fused_gr_read(
    residual: Tensor,
    w_norm: Tensor,
    w_down: Tensor,
    w_up: Tensor,
    w_inject: Tensor | None = None,
    block_out: Tensor | None = None,
    inject_prev: Tensor | None = None,
    *,
    eps: float | None = None,
    q8_1: bool = False,
    variant: str,
    q8_columns: int = 0,
    card: str | None = None,
    seed: int = 0,
    strict: bool = False,
) -> FusedGrRead:
    """`strata_ops.fused_gr_read` by a variant of the caller's choice. Untested and unsupported, see above.

    Args:
        variant: one of `variants(residual.device)`.
        q8_columns: which up kernel of a GPU quantises: 16 or 32 columns a block, 0 for the environment's choice.
        card: the simulated card that reads these CPU tensors (see strata_ops.cards), with the `seed` of its order; a
            `strict` one looks at every access.
    """
    if card is not None:
        return cards.open_card(card, seed, strict).read(
            residual,
            w_norm,
            w_down,
            w_up,
            w_inject,
            block_out,
            inject_prev,
            eps=1e-6 if eps is None else eps,
            q8_1=q8_1,
            variant=variant,
            q8_columns=q8_columns,
        )
    mixed, inject, residual_out, lo, rs, blocks = _read_variant(
        residual,
        w_norm,
        w_down,
        w_up,
        w_inject,
        block_out,
        inject_prev,
        eps=1e-6 if eps is None else eps,
        q8_1=q8_1,
        variant=variant,
        q8_columns=q8_columns,
    )
    return FusedGrRead(
        mixed,
        None if w_inject is None else inject,
        None if block_out is None else residual_out,
        lo,
        rs,
        blocks if q8_1 else None,
    )
