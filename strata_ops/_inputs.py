"""Reads to try: weights and activations that look like a checkpoint's, the same for the same seed on every machine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Geometry(NamedTuple):
    width: int  # N
    streams: int  # HC
    rank: int  # LR


MODEL = Geometry(2560, 4, 320)


class Inputs(NamedTuple):
    """The tensors of a read, in the op's order: `fused_gr_read(*inputs)`."""

    residual: Tensor
    w_norm: Tensor
    w_down: Tensor
    w_up: Tensor
    w_inject: Tensor | None
    block_out: Tensor | None
    inject_prev: Tensor | None

    def to(self, device: torch.device | str) -> Inputs:
        return Inputs(*(None if t is None else t.to(device) for t in self))

    def only(self, tokens: int, *, fold: bool, inject: bool) -> Inputs:
        """The first `tokens` tokens, with or without a pending write and inject rows. Activations are copies."""
        return self._replace(
            residual=self.residual[:tokens].clone(),
            w_inject=self.w_inject if inject else None,
            block_out=self.block_out[:tokens].clone() if fold else None,
            inject_prev=self.inject_prev[:tokens].clone() if fold else None,
        )


def make_inputs(
    tokens: int,
    geometry: Geometry = MODEL,
    *,
    seed: int = 0,
    special: bool = False,
    streams_of: torch.dtype = torch.float32,
) -> Inputs:
    """All inputs of a read of `tokens` tokens on the CPU; see `Inputs.only` for less.

    The streams are of different sizes and a few channels stand out, the gains lie around 1, and the weights are scaled
    so that gates are neither open nor shut. With `special`, `plant_specials` is applied. `streams_of` is the dtype of
    `residual` and `block_out`: the same values, rounded.
    """
    random = torch.Generator().manual_seed(seed)
    width, streams, rank = geometry
    depth = width * streams

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    channel = torch.exp(0.5 * normal(width))
    channel[torch.randperm(width, generator=random)[: max(1, width // 256)]] *= 30.0
    stream = torch.linspace(0.5, 4.0, streams).unsqueeze(-1)
    inputs = Inputs(
        residual=normal(tokens, streams, width) * stream * channel,
        w_norm=1.0 + 0.2 * normal(streams, width),
        w_down=(normal(rank, depth) * (streams / depth**0.5)).bfloat16(),
        w_up=(normal(depth, rank) * (3.0 / rank**0.5)).bfloat16(),
        w_inject=(normal(streams, depth) * (streams / depth**0.5)).bfloat16(),
        block_out=normal(tokens, width) * 0.3 * channel,
        inject_prev=normal(tokens, streams) * 2.0,
    )
    if special:
        plant_specials(inputs)
    return inputs._replace(residual=inputs.residual.to(streams_of), block_out=inputs.block_out.to(streams_of))


def plant_specials(inputs: Inputs) -> None:
    """Gives every token but each eighth one kind of value that arithmetic stumbles over, in place."""
    residual, block_out, inject_prev = inputs.residual, inputs.block_out, inputs.inject_prev
    last = residual.shape[-1] - 1
    for token in range(residual.shape[0]):
        kind = token % 8
        if kind == 0:  # a NaN in one stream
            residual[token, 0, last // 2] = torch.nan
        elif kind == 1:  # an infinity in one stream
            residual[token, -1, last] = -torch.inf
        elif kind == 2:  # squares and products below the smallest normal number
            residual[token] *= 1e-30
            block_out[token] *= 1e-38
        elif kind == 3:  # squares that overflow
            residual[token] *= 1e22
        elif kind == 4:  # zeros of both signs
            residual[token] = 0.0
            residual[token, :, ::2] = -0.0
            block_out[token] = -0.0
        elif kind == 5:  # write gains at their ends
            inject_prev[token] = torch.inf
            inject_prev[token, 0] = -torch.inf
        elif kind == 6:  # opposite infinities meet in the write
            residual[token, 0, 0] = torch.inf
            block_out[token, 0] = -torch.inf
