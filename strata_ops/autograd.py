"""Gradients of a read: the formulae, and the function by which autograd knows them.

`strata_ops.fused_gr_read` takes it only where a gradient is wanted. A formula registered for the op itself would put
Python into every call of inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_read = torch.ops.strata.fused_gr_read.default


def gradients(
    inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor | None], eps: float, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradient of sum(cotangent * output) over all outputs, for each input that is `needed`; None for the others.

    `inputs` are those of `fused_gr_read` in its order, `cotangents` those of its outputs (that of q8_1 is not looked
    at), None where an output was not used. Computed in fp32, in fp64 for fp64 inputs, and rounded once to each input's
    dtype. Made of differentiable operations, so gradients of gradients are autograd's.

    For one token, with c a stream, d a position in it, N positions, HC streams, and dy the cotangent of an output y or
    the gradient of a value y. The read again:

        fold     g = 2 sigmoid(p/HC), x = R + b g, of the streams R, block_out b and inject_prev p (a stream's own
                 rounding, where it has one, counts as the identity)
        norm     r = (mean_d x^2 + eps)^(-1/2), n = x w r
        down     z = (W_down n)/HC, s = sigmoid(z), lo = z s
        up       G = sigmoid(W_up lo)
        mix      mixed = mean_c n G; inject = W_inject n

    and its steps reversed, += where a value is read in two places:

        mix      m = dmixed/HC:  dG = m n, dn = m G
        up       du = dG G (1-G):  dW_up = du lo^T, dlo += W_up^T du
        down     dv = dlo s (1 + z (1-s)) / HC:  dW_down = dv n^T, dn += W_down^T dv
        inject   dW_inject = dinject n^T, dn += W_inject^T dinject
        norm     dw = dn x r, dr += sum_d dn w x, dx = dresidual_out + dn w r - dr r^3 x / N
        fold     dR = dx, db = sum_c g dx, dg = sum_d b dx, dp = dg g (1 - g/2) / HC

    Weights' gradients are summed over the tokens.
    """
    residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev = inputs
    assert residual is not None and w_norm is not None and w_down is not None and w_up is not None
    streams, width = residual.shape[-2:]
    wide = torch.promote_types(residual.dtype, torch.float32)

    def over_tokens(left: Tensor, right: Tensor) -> Tensor:
        """The sum of all tokens' left right^T."""
        return left.reshape(-1, left.shape[-1]).T @ right.reshape(-1, right.shape[-1])

    def by_stream(t: Tensor) -> Tensor:
        return t.reshape(*t.shape[:-1], streams, width)

    x, gain, down, up = residual.to(wide), w_norm.to(wide), w_down.to(wide), w_up.to(wide)
    if block_out is not None and inject_prev is not None:
        block = block_out.to(wide).unsqueeze(-2)
        write = 2 * torch.sigmoid(inject_prev.to(wide) / streams).unsqueeze(-1)
        x = (x + block * write).to(residual.dtype).to(wide)
    rs = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * gain * rs
    flat = normed.flatten(-2)
    z = flat @ down.T / streams
    s = torch.sigmoid(z)
    lo = z * s
    gate = torch.sigmoid(by_stream(lo @ up.T))

    # For an output that was not used, the number 0: zeros would have to be made in every kind of tensor.
    d_mixed, d_inject, d_residual_out, d_lo, d_rs = (None if t is None else t.to(wide) for t in cotangents[:5])
    d_w_norm = d_w_down = d_w_up = d_w_inject = d_block_out = d_inject_prev = None
    share = 0 if d_mixed is None else d_mixed.unsqueeze(-2) / streams
    d_up = (share * normed * gate * (1 - gate)).flatten(-2)
    d_down = (d_up @ up + (0 if d_lo is None else d_lo)) * s * (1 + z * (1 - s)) / streams
    d_normed = share * gate + by_stream(d_down @ down)
    if needed[2]:
        d_w_down = over_tokens(d_down, flat)
    if needed[3]:
        d_w_up = over_tokens(d_up, lo)
    if w_inject is not None and d_inject is not None:
        d_normed = d_normed + by_stream(d_inject @ w_inject.to(wide))
        if needed[4]:
            d_w_inject = over_tokens(d_inject, flat)
    if needed[1]:
        d_w_norm = (d_normed * x * rs).reshape(-1, streams, width).sum(0)
    d_scaled = d_normed * gain
    d_r = (d_scaled * x).sum(-1, keepdim=True) + (0 if d_rs is None else d_rs.unsqueeze(-1))
    d_x = d_scaled * rs - d_r * rs.pow(3) * x / width
    if block_out is not None:
        d_x = d_x + (0 if d_residual_out is None else d_residual_out)
        if needed[5]:
            d_block_out = (write * d_x).sum(-2)
        if needed[6]:
            d_write = (block * d_x).sum(-1, keepdim=True)
            d_inject_prev = (d_write * write * (1 - write / 2) / streams).squeeze(-1)
    results = (d_x if needed[0] else None, d_w_norm, d_w_down, d_w_up, d_w_inject, d_block_out, d_inject_prev)
    return tuple(None if d is None or t is None else d.to(t.dtype) for d, t in zip(results, inputs))


class GatedResidualRead(torch.autograd.Function):
    """The op with gradients for all its float inputs: `apply(residual, ..., inject_prev, eps)` gives its six outputs.

    Only the inputs are kept for the backward pass, which reads again in PyTorch's own operations.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        *inputs, eps = arguments
        outputs: tuple[Tensor, ...] = _read(*inputs, eps=eps)
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.eps = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(output[-1])  # q8_1, empty here

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        with torch.autocast(inputs[0].device.type, enabled=False):
            return *gradients(inputs, cotangents, ctx.eps, ctx.needs_input_grad), None
