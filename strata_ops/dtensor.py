"""Sharding rules: how a read of `torch.distributed.tensor.DTensor`s goes to the devices of a mesh.

Tokens are independent, so the leading dimensions may be sharded, weights are the same everywhere, and the results lie
as the tokens do; no device talks to another. An argument that lies otherwise is redistributed first, as DTensor does.
Each token's bytes are those of a read on one device. Gradients of replicated weights come as partial sums.

`strata_ops.fused_gr_read` imports this module when it meets its first DTensor. For `torch.ops.strata.fused_gr_read` and
under torch.compile, import it before. (A compiled backward pass wants every output of a read of DTensors used, or
detached; torch says so.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_OUTPUTS = 6


def read_shardings(
    residual: Any,
    w_norm: Any,
    w_down: Any,
    w_up: Any,
    w_inject: Any = None,
    block_out: Any = None,
    inject_prev: Any = None,
    **_: Any,
) -> list[tuple[list[Placement | None], list[Placement | None]]]:
    """What one dimension of a mesh may hold: everything, or a share of any one leading dimension."""
    weights = [None if t is None else Replicate() for t in (w_norm, w_down, w_up, w_inject)]

    def with_tokens(place: Placement) -> tuple[list[Placement | None], list[Placement | None]]:
        pending = [None if t is None else place for t in (block_out, inject_prev)]
        return [place] * _OUTPUTS, [place, *weights, *pending]

    return [with_tokens(place) for place in (Replicate(), *map(Shard, range(len(residual.shape) - 2)))]


register_sharding(torch.ops.strata.fused_gr_read.default)(read_shardings)
