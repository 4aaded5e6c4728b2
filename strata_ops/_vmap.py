"""What torch.vmap makes of the ops: batches of activations are leading dimensions, which the op takes as it is."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _core

_WEIGHTS = range(1, 5)  # of the op's inputs


def _front(tensor: Tensor | None, dimension: int | None, size: int) -> Tensor | None:
    """The batch as the first dimension; one tensor for all, where it has no batch."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dimension is None else tensor.movedim(dimension, 0)


def _read(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor | None, **options: Any) -> tuple[Any, ...]:
    for position in _WEIGHTS:
        if position < len(in_dims) and in_dims[position] is not None:
            raise RuntimeError(
                f"fused_gr_read: vmap over '{_core.ARGUMENTS[position]}' is not offered, only over residual, block_out "
                "and inject_prev; call it once for each set of weights"
            )
    batched = [
        tensor if position in _WEIGHTS else _front(tensor, dimension, info.batch_size)
        for position, (tensor, dimension) in enumerate(zip(inputs, in_dims))
    ]
    outputs = torch.ops.strata.fused_gr_read.default(*batched, **options)
    return outputs, (0,) * len(outputs)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("fused_gr_read: vmap does not take the in-place form; call fused_gr_read")


torch.library.register_vmap("strata::fused_gr_read", _read)
torch.library.register_vmap("strata::fused_gr_read_", _refuse)
