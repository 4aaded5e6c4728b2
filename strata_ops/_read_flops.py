"""What torch.utils.flop_counter counts of a read: the multiplications and additions of its matrix products, as it does
for PyTorch's own operations, and nothing for what goes element by element."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_packets = [torch.ops.strata.fused_gr_read, torch.ops.strata.fused_gr_read_]


@register_flop_formula(_packets)
def read_flops(
    residual: torch.Size, w_norm: torch.Size, w_down: torch.Size, w_up: torch.Size, *optional: Any, **_: Any
) -> int:
    """T * (2*LR*D + 2*D*LR, and 2*HC*D where inject is asked for), D = HC*N: two for each weight and token."""
    *lead, streams, width = residual
    depth, rank = streams * width, w_down[0]
    down = 2 * rank * depth
    up = 2 * depth * rank
    inject = 2 * streams * depth if optional and optional[0] is not None else 0
    return math.prod(lead) * (down + up + inject)
