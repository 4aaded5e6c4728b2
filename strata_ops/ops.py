"""The ops in Python: the functions that people call, and the fake kernels that torch traces with.

The kernels and their schemas are in the C++ libraries (csrc/torch). No Python runs inside `torch.ops.strata.*`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from . import _core
from ._libraries import why_no_kernels
from .autograd import GatedResidualRead


class FusedGrRead(NamedTuple):
    """What a read gives. All are new tensors on the inputs' device; None was not asked for.

    `...` stands for the leading dimensions of `residual`.
    """

    mixed: Tensor
    """(..., N) float32: the block's input, the gated mean of the normalised streams."""
    inject: Tensor | None
    """(..., HC) float32: the raw inject logits, which the next read takes as `inject_prev`. Asked for by `w_inject`."""
    residual_out: Tensor | None
    """(..., HC, N), `residual`'s dtype: the streams after the pending write. Asked for by `block_out`."""
    lo: Tensor
    """(..., LR) float32: the gate's hidden values, after silu."""
    rs: Tensor
    """(..., HC) float32: the reciprocal RMS of each stream."""
    q8_1: Tensor | None
    """(..., N/32, 36) uint8: `mixed` in ggml's q8_1 blocks {half d, half s, int8 q[32]}. Asked for by `q8_1=True`."""


# The default of eps is a number in the code and not in the signature: torch.compile(dynamic=True) makes a symbol of a
# float that it finds in a signature, and compiles a second time when it sees that the op needs the number.
_read = torch.ops.strata.fused_gr_read.default
_read_in_place = torch.ops.strata.fused_gr_read_.default
_read_out = torch.ops.strata.fused_gr_read.out


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
) -> FusedGrRead:
    """Reads HC residual streams of N values into one, for each token: a block's input in the gated-residual model.

    The maths is that of Hugging Face Transformers' `Qwen4ExpTextGatedResidual`, in fp32 from bf16 weights. A token's
    result is the same 32 bits on every device, for every variant, whatever the other tokens are.

    Args:
        residual: (..., HC, N) float32 or bfloat16, the streams R. `...` are any leading dimensions, one token where
            there are none. N is a multiple of 32, HC is 1 to 8. May be strided.
        w_norm: (HC, N) float32, the full gain. A checkpoint's `hc_norm.weight` is centred at zero: pass 1 + weight.
        w_down: (LR, HC*N) bfloat16, `input_mix_weight_down.weight`. LR is a multiple of 8.
        w_up: (HC*N, LR) bfloat16, `input_mix_weight_up.weight`.
        w_inject: (HC, HC*N) bfloat16, `block_inject_weight.weight`, or None: no `inject` is computed.
        block_out: (..., N) of `residual`'s dtype, what the previous block gave, or None: no write is pending. May be
            strided.
        inject_prev: (..., HC) float32, the previous read's `inject`; given exactly where `block_out` is.
        eps: added to the mean square, 1e-6 where None; rounded to fp32 once, neither negative nor NaN.
        q8_1: whether `mixed` is also wanted quantised.

    Weights and `w_norm` must be contiguous, start on a 16-byte boundary and be on `residual`'s device.

    Returns:
        FusedGrRead. For each token, with c a stream, d a position in it, and D = HC*N:

        1. The pending write lands: R'[c, d] = R[c, d] + block_out[d] * 2*sigmoid(inject_prev[c] / HC) is
           `residual_out`. Without one, R' = R. Streams of bfloat16 are computed in fp32 and R' is rounded to bfloat16
           (nearest even) once, here; everything below reads the rounded value.
        2. Each stream is RMS-normalised: rs[c] = 1 / sqrt(mean_d R'[c, d]^2 + eps), xn = R' * w_norm * rs.
        3. The D values are squeezed to LR: lo = silu((w_down @ xn) / HC). The logits of the next write, if wanted, come
           from the same values: inject = w_inject @ xn.
        4. A gate for each of the D values: gate = sigmoid(w_up @ lo).
        5. The streams are mixed: mixed[d] = mean_c xn[c, d] * gate[c, d].
        6. If wanted, blocks of 32 of `mixed` are quantised: d = max|x| / 127, q = round(x / d), s = sum of x.

    Raises:
        RuntimeError: an argument that does not fit (one line: which, what was expected, what was given, a remedy),
            before anything is launched; memory that is lacking; a launch that failed; or a derivative that is not
            offered: of `q8_1`, or by forward mode.

    Gradients:
        Where gradients are recorded and an input requires grad, all float outputs have them, for all inputs; the bytes
        of the outputs are the same. Only the inputs are kept for the backward pass, so what a read adds until then is
        its `T*(HC*N + N + HC)` values of activations, where nobody else keeps them. The backward pass computes the read
        again in fp32 by PyTorch's own operations (strata_ops.autograd has the formulae); at 2560/4/320 it takes up to
        26 MB for the weights in fp32, 40 MB for their gradients if wanted, and 0.41 MB a token. Its error is at most
        4 times that of PyTorch's own fp32 gradients of the same maths, and gradients of bf16 weights are then rounded
        once. Gradients of gradients work, but not through torch.compile, which has none.

    `torch.ops.strata.fused_gr_read` is the same op for inference only: it has no gradients (torch warns, or gives zeros
    under torch.func) and no named tuple; what was not asked for has a last dimension of 0 there. Both work under
    torch.compile, torch.export, torch.vmap (over activations) and in CUDA graphs, this one under torch.func too.
    """
    inputs = (residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev)
    eps = 1e-6 if eps is None else eps
    try:
        if _asking_gradient(inputs) is None:
            mixed, inject, residual_out, lo, rs, blocks = _read(*inputs, eps=eps, q8_1=q8_1)
        elif q8_1:
            _refuse_gradients("q8_1 has no gradients; pass q8_1=False", inputs)
        else:
            mixed, inject, residual_out, lo, rs, blocks = GatedResidualRead.apply(*inputs, eps)  # type: ignore[no-untyped-call]
    except NotImplementedError as error:
        if _learn_shardings(residual):
            return fused_gr_read(*inputs, eps=eps, q8_1=q8_1)
        _raise_no_kernels(residual, error)
    return FusedGrRead(
        mixed,
        None if w_inject is None else inject,
        None if block_out is None else residual_out,
        lo,
        rs,
        blocks if q8_1 else None,
    )


def fused_gr_read_(
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
) -> FusedGrRead:
    """`fused_gr_read` that lands the pending write in `residual` itself; `residual_out` of the result is None.

    `residual` must be contiguous, start on a 16-byte boundary and share no memory with another argument. Without a
    pending write its bytes are left alone. Everything else is as for `fused_gr_read`.

    Autograd is told of the change, so that a graph which saved `residual` complains and is not wrong. (The op itself,
    `torch.ops.strata.fused_gr_read_`, cannot say so under the stable ABI.) There are no gradients in this form: an
    input that requires grad is refused while they are recorded.
    """
    _refuse_gradients(
        "the in-place form has no gradients; call fused_gr_read",
        (residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev),
    )
    try:
        mixed, inject, lo, rs, blocks = _read_in_place(
            residual,
            w_norm,
            w_down,
            w_up,
            w_inject,
            block_out,
            inject_prev,
            eps=1e-6 if eps is None else eps,
            q8_1=q8_1,
        )
    except NotImplementedError as error:
        _raise_no_kernels(residual, error)
    if block_out is not None:
        increment_version(residual)
    return FusedGrRead(mixed, None if w_inject is None else inject, None, lo, rs, blocks if q8_1 else None)


def fused_gr_read_out(
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
    out: FusedGrRead,
) -> FusedGrRead:
    """`fused_gr_read` that writes into the buffers of `out`, for example an earlier read's result, and returns `out`.

    Every buffer must have the shape and dtype that `fused_gr_read` would give it, be contiguous, start on a 16-byte
    boundary and share no memory with an input or another buffer; what is not asked for must be None. There are no
    gradients in this form: an input or a buffer that requires grad is refused while they are recorded. Everything else
    is as for `fused_gr_read`.
    """
    _refuse_gradients(
        "the form with buffers has no gradients; call fused_gr_read",
        (residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev, *out),
    )
    inject, residual_out, blocks = out.inject, out.residual_out, out.q8_1
    if inject is None or residual_out is None or blocks is None:
        lead, (streams, width) = residual.shape[:-2], residual.shape[-2:]
        inject = residual.new_empty((*lead, 0), dtype=torch.float32) if inject is None else inject
        residual_out = residual.new_empty((*lead, streams, 0)) if residual_out is None else residual_out
        blocks = residual.new_empty((*lead, width // 32, 0), dtype=torch.uint8) if blocks is None else blocks
    try:
        _read_out(
            residual,
            w_norm,
            w_down,
            w_up,
            w_inject,
            block_out,
            inject_prev,
            eps=1e-6 if eps is None else eps,
            q8_1=q8_1,
            mixed=out.mixed,
            inject=inject,
            residual_out=residual_out,
            lo=out.lo,
            rs=out.rs,
            q8_1_out=blocks,
        )
    except NotImplementedError as error:
        _raise_no_kernels(residual, error)
    for buffer in out:
        if buffer is not None:
            increment_version(buffer)
    return out


def _asking_gradient(tensors: Sequence[Tensor | None]) -> int | None:
    """The position of the first tensor that wants a gradient; None where none does. Every call of inference asks."""
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(tensors)
    if torch.is_grad_enabled():
        for position, tensor in enumerate(tensors):
            if tensor is not None and tensor.requires_grad:
                return position
    return None


def _refuse_gradients(why: str, tensors: Sequence[Tensor | None]) -> None:
    position = _asking_gradient(tensors)
    if position is not None:
        raise RuntimeError(
            f"fused_gr_read: '{_core.ARGUMENTS[position]}' requires grad, but {why}, or call under torch.no_grad()"
        )


def _refuse_forward_mode(tensors: Sequence[Tensor | None]) -> None:
    """The op would drop a tangent without a word."""
    for position, tensor in enumerate(tensors):
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"fused_gr_read: '{_core.ARGUMENTS[position]}' has a tangent, but forward-mode derivatives are not "
                "offered; use reverse mode (torch.func.vjp, jacrev)"
            )


def _is_distributed(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def _learn_shardings(residual: Tensor) -> bool:
    """Whether rules for DTensors were missing, and are there now."""
    rules = f"{__package__}.dtensor"
    if not _is_distributed(residual) or rules in sys.modules:
        return False
    import_module(rules)
    return True


def _raise_no_kernels(residual: Tensor, error: NotImplementedError) -> NoReturn:
    """In our words where a library or a form is missing; in torch's for the rest, a sparse tensor for one."""
    reason = why_no_kernels(residual.device)
    if not reason and _is_distributed(residual):
        reason = "DTensors can be read by fused_gr_read alone; call it, or pass .to_local() of each argument"
    if not reason:
        raise error
    raise RuntimeError(f"fused_gr_read: {reason}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Fake kernels. The checks and their texts are the C++ kernels' own (csrc/common/argument_checks.hpp); sizes that torch
# has made symbols are checked by their hints, without a guard, and the outputs' shapes stay symbols.

_UNKNOWN = -1
_REGION_BITS = 44


def _known(value: int | torch.SymInt) -> int:
    """A size as a number, without guarding on it; _UNKNOWN where it has none yet."""
    if isinstance(value, int):
        return value
    hint = value.node.hint if value.node.has_hint() else None
    return hint if isinstance(hint, int) else _UNKNOWN


def _describe(tensors: Sequence[Tensor | None]) -> list[_core.Tensor | None]:
    """Tensors as the checks take them. Each storage gets a region of made-up addresses, so overlaps still show."""
    regions: dict[int, int] = {}
    described: list[_core.Tensor | None] = []
    for tensor in tensors:
        if tensor is None:
            described.append(None)
            continue
        region = regions.setdefault(tensor.untyped_storage()._cdata, len(regions) + 1) << _REGION_BITS
        offset = _known(tensor.storage_offset())
        described.append(
            _core.Tensor(
                str(tensor.dtype),
                tensor.device.type,
                tensor.device.index or 0,
                [_known(size) for size in tensor.shape],
                [_known(stride) for stride in tensor.stride()],
                0 if offset == _UNKNOWN else region + offset * tensor.element_size(),
            )
        )
    return described


def _check(form: str, tensors: Sequence[Tensor | None], eps: float, q8_1: bool) -> None:
    refusal = _core.check_read(form, _describe(tensors), eps, q8_1)
    if refusal is not None:
        raise RuntimeError(refusal)


def _empty_outputs(
    residual: Tensor, w_down: Tensor, w_inject: Tensor | None, block_out: Tensor | None, q8_1: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    lead, (streams, width), rank = residual.shape[:-2], residual.shape[-2:], w_down.shape[0]
    blocks = width // _core.Q8_BLOCK
    f32 = torch.float32
    return (
        residual.new_empty((*lead, width), dtype=f32),
        residual.new_empty((*lead, 0 if w_inject is None else streams), dtype=f32),
        residual.new_empty((*lead, streams, 0 if block_out is None else width)),
        residual.new_empty((*lead, rank), dtype=f32),
        residual.new_empty((*lead, streams), dtype=f32),
        residual.new_empty((*lead, blocks, _core.Q8_BYTES if q8_1 else 0), dtype=torch.uint8),
    )


@torch.library.register_fake("strata::fused_gr_read")
def _(residual, w_norm, w_down, w_up, w_inject=None, block_out=None, inject_prev=None, *, eps=1e-6, q8_1=False):  # type: ignore[no-untyped-def]
    _check("functional", (residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev), eps, q8_1)
    return _empty_outputs(residual, w_down, w_inject, block_out, q8_1)


@torch.library.register_fake("strata::fused_gr_read_")
def _(residual, w_norm, w_down, w_up, w_inject=None, block_out=None, inject_prev=None, *, eps=1e-6, q8_1=False):  # type: ignore[no-untyped-def]
    _check("in_place", (residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev), eps, q8_1)
    mixed, inject, _, lo, rs, blocks = _empty_outputs(residual, w_down, w_inject, block_out, q8_1)
    return mixed, inject, lo, rs, blocks


@torch.library.register_fake("strata::fused_gr_read.out")
def _(  # type: ignore[no-untyped-def]
    residual,
    w_norm,
    w_down,
    w_up,
    w_inject=None,
    block_out=None,
    inject_prev=None,
    *,
    eps=1e-6,
    q8_1=False,
    mixed,
    inject,
    residual_out,
    lo,
    rs,
    q8_1_out,
):
    inputs = (residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev)
    _check("out", (*inputs, mixed, inject, residual_out, lo, rs, q8_1_out), eps, q8_1)


@torch.library.register_fake("strata::_fused_gr_read_variant")
def _(  # type: ignore[no-untyped-def]
    residual,
    w_norm,
    w_down,
    w_up,
    w_inject=None,
    block_out=None,
    inject_prev=None,
    *,
    eps=1e-6,
    q8_1=False,
    variant,
    q8_columns=0,
):
    _check("functional", (residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev), eps, q8_1)
    return _empty_outputs(residual, w_down, w_inject, block_out, q8_1)
