"""What a gated-residual read means, written four times, each for one purpose. Slow; for tests, parity and papers.

`read_fp64`           the same maths in float64: the truth that results are measured against
`read_eager`          the same maths in float32 by PyTorch's own operations, in whatever order those sum: the
                      yardstick of `tolerance`
`read_transformers`   Hugging Face's Qwen4ExpTextGatedResidual: its order and its bf16 rounding points
`read_exact`          the arithmetic contract, operation by operation, in NumPy: the same bits as every backend

All take the arguments of `strata_ops.fused_gr_read` and return `Read`, whose fields have the op's names and None for
what was not asked for. Tensors stay on the CPU.

Streams of bfloat16 (`residual` and `block_out`) are widened. All but `read_fp64`, which knows no rounding, then round
R' to bfloat16 where it is stored: that error is part of `tolerance` then.

How far a result may be from `read_fp64` is `tolerance`: the error of `read_eager` on the same inputs, or a unit in the
last place where that is more, times FACTOR = 4. The factor stands for another order of the same sums: of the contract
itself, 1.9 was the most that was seen. Largest error in 40 sets of checkpoint-like inputs of 4 tokens each, with fold
and inject, relative to the largest value of the output, in units of 1e-7 (Transformers in units of 1e-3, from a stream
that it rounds to bf16 first; its inject is another quantity):

                   2560/4/320        2048/4/320          96/3/24            32/1/8
                contract  eager   contract  eager   contract  eager   contract  eager   Transformers, 2560/4/320
  mixed              2.0    2.7        1.6    2.3        2.5    3.2        4.0    3.6                        9.3
  inject             3.1   20.8        3.5   17.0        2.5    3.6        3.4    4.5                          -
  residual_out       0.9    1.1        0.6    0.9        0.8    0.9        0.7    0.7                        6.5
  lo                 2.2    6.1        2.6    5.3        2.1    5.0        2.8    3.1                        8.1
  rs                 1.5    1.3        1.3    1.4        1.3    1.3        1.1    1.5                        0.9

(Units of 1e-7: one unit in the last place of a value just above a power of two is 1.2.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F


class Read(NamedTuple):
    mixed: torch.Tensor
    inject: torch.Tensor | None
    residual_out: torch.Tensor | None
    lo: torch.Tensor
    rs: torch.Tensor
    q8_1: object = None


class Q8(NamedTuple):
    """What blocks of q8_1 say: `d` and `s` (..., blocks), `q` (..., blocks, 32); a block's values are d * q."""

    d: torch.Tensor
    s: torch.Tensor
    q: torch.Tensor

    def values(self) -> torch.Tensor:
        return (self.d.unsqueeze(-1) * self.q).flatten(-2)


def decode_q8_1(image: torch.Tensor) -> Q8:
    """The op's q8_1 bytes (..., blocks, 36) as float64."""
    data = np.ascontiguousarray(image.cpu().numpy())
    halves = data[..., :4].copy().view("<f2").astype(np.float64)
    q = data[..., 4:].copy().view(np.int8).astype(np.float64)
    return Q8(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (halves[..., 0], halves[..., 1], q)))


# ----------------------------------------------------------------------------------------------------------------------
# The maths, in one floating-point type


def _read(dtype, stored_as, residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev, eps) -> Read:
    streams, width = residual.shape[-2:]
    eps = torch.tensor(eps, dtype=torch.float32).to(dtype)  # the op rounds it to fp32, once
    residual, w_norm, w_down, w_up = (t.cpu().to(dtype) for t in (residual, w_norm, w_down, w_up))
    folded = block_out is not None
    if folded:
        gain = 2 * torch.sigmoid(inject_prev.cpu().to(dtype) / streams)
        residual = residual + block_out.cpu().to(dtype).unsqueeze(-2) * gain.unsqueeze(-1)
        if stored_as is not None:
            residual = residual.to(stored_as).to(dtype)
    rs = 1 / torch.sqrt(residual.square().mean(-1) + eps)
    normed = residual * w_norm * rs.unsqueeze(-1)
    flat = normed.flatten(-2)
    lo = F.silu(flat @ w_down.T / streams)
    gate = torch.sigmoid(lo @ w_up.T).unflatten(-1, (streams, width))
    mixed = (normed * gate).mean(-2)
    inject = None if w_inject is None else flat @ w_inject.cpu().to(dtype).T
    return Read(mixed, inject, residual if folded else None, lo, rs)


def read_fp64(residual, w_norm, w_down, w_up, w_inject=None, block_out=None, inject_prev=None, *, eps=1e-6, q8_1=False):
    """The read in float64. `q8_1` is a Q8 of the float64 values: d and s unrounded, q limited to [-127, 127]."""
    read = _read(torch.float64, None, residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev, eps)
    if not q8_1:
        return read
    blocks = read.mixed.unflatten(-1, (-1, 32))
    d = blocks.abs().amax(-1) / 127
    ratio = torch.where(d.unsqueeze(-1) == 0, 0, blocks / d.unsqueeze(-1))
    q = torch.copysign(torch.floor(ratio.abs() + 0.5), ratio).clamp(-127, 127)
    return read._replace(q8_1=Q8(d, blocks.sum(-1), q))


def read_eager(residual, w_norm, w_down, w_up, w_inject=None, block_out=None, inject_prev=None, *, eps=1e-6):
    """The read as anybody would write it in PyTorch, in float32."""
    read = _read(torch.float32, residual.dtype, residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev, eps)
    return read if read.residual_out is None else read._replace(residual_out=read.residual_out.to(residual.dtype))


FACTOR = 4


def tolerance(*args, eps=1e-6) -> dict[str, float]:
    """For each float output, the largest absolute error that a correct read of these inputs may have.

    FACTOR times the largest error of `read_eager` on them, or FACTOR units in the last place (2^-23) of the output's
    largest value where that is more: on a small geometry eager PyTorch can be exact by chance. Inputs must be finite.
    """
    truth, eager = read_fp64(*args, eps=eps), read_eager(*args, eps=eps)
    bounds = {}
    for name in ("mixed", "inject", "residual_out", "lo", "rs"):
        exact, rounded = getattr(truth, name), getattr(eager, name)
        if exact is not None and exact.numel():
            error = (rounded.double() - exact).abs().max().item()
            bounds[name] = FACTOR * max(error, 2.0**-23 * exact.abs().max().item())
    return bounds


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face's order and rounding


def read_transformers(residual, w_norm, w_down, w_up, w_inject=None, block_out=None, inject_prev=None, *, eps=1e-6):
    """The read as Transformers' model does it in bfloat16: every result below is rounded to bf16 once.

    The stream itself is bf16, so `residual`, `block_out` and `inject_prev` are rounded on the way in. `w_norm` is the
    full gain in fp32, which Transformers makes from its bf16 weight as 1 + w. Two things differ from the op's outputs:
    `inject` comes back activated, 2 * sigmoid(logit / HC), and `rs` is the fp32 value inside the norm.
    `inject_prev` is the raw logit, as for the op, and is activated here in the model's bf16 steps.
    """
    bf16 = torch.bfloat16
    streams, width = residual.shape[-2:]
    residual, w_down, w_up = (t.cpu().to(bf16) for t in (residual, w_down, w_up))

    def activated(logit):
        return 2 * torch.sigmoid(logit / streams)

    folded = block_out is not None
    if folded:
        write = block_out.cpu().to(bf16).unsqueeze(-2) * activated(inject_prev.cpu().to(bf16)).unsqueeze(-1)
        residual = residual + write
    wide = residual.float()
    rs = torch.rsqrt(wide.pow(2).mean(-1) + eps)
    normed = (wide * rs.unsqueeze(-1) * w_norm.cpu()).to(bf16)
    flat = normed.flatten(-2)
    lo = F.silu(F.linear(flat, w_down) / streams)
    gate = torch.sigmoid(F.linear(lo, w_up)).unflatten(-1, (streams, width))
    mixed = (gate * normed).mean(-2)
    inject = None if w_inject is None else activated(F.linear(flat, w_inject.cpu().to(bf16)))
    return Read(mixed, inject, residual if folded else None, lo, rs)


# ----------------------------------------------------------------------------------------------------------------------
# The contract, bit for bit

_f32 = np.float32
_LANES, _CHUNK, _NORM_THREADS = 32, 8, 256


def fma(a, b, c):
    """a * b + c in float32 with one rounding.

    The product of two floats is exact in float64. Its sum with c is not, and rounding it twice could go wrong at the
    midpoints of float32; so TwoSum gives the part that float64 lost, and where there is one the sum is rounded to odd,
    which float64's 29 spare bits make harmless to the second rounding.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    shadow = total - product
    lost = (product - (total - shadow)) + (addend - shadow)
    bits = np.atleast_1d(total).view(np.int64)
    inexact = np.isfinite(total) & np.isfinite(lost) & (lost != 0)
    toward = np.where((lost > 0) == (total > 0), 1, -1)  # away from zero or to it, in the integer order of the bits
    odd = np.where(np.atleast_1d(inexact) & (bits & 1 == 0), bits + np.atleast_1d(toward), bits)
    return odd.view(np.float64).reshape(np.shape(total)).astype(_f32)


# exp's numbers, as csrc/common/exp.hpp has them.
_HIGH, _LOW, _ROUND = _f32(89), _f32(-104), _f32(12582912)
_LOG2E, _LN2_HIGH, _LN2_LOW = (_f32(float.fromhex(t)) for t in ("0x1.715476p+0", "0x1.62e430p-1", "-0x1.05c610p-29"))
_C2, _C3, _C4, _C5, _C6 = (
    _f32(float.fromhex(t))
    for t in ("0x1.fffffcp-2", "0x1.555484p-3", "0x1.5558dcp-5", "0x1.124188p-7", "0x1.6a16bep-10")
)


def exp_exact(x):
    """The project's exp. The polynomial is s; `tail` gives back what rounding took from 1 + r and from r."""
    x = np.asarray(x, _f32)
    x = np.where(x > _HIGH, _HIGH, x)
    x = np.where(x < _LOW, _LOW, x)
    rounded = x * _LOG2E + _ROUND
    n = rounded - _ROUND
    r_high = fma(-n, _LN2_HIGH, x)
    r = fma(-n, _LN2_LOW, r_high)
    s = _C6
    for coefficient in (_C5, _C4, _C3, _C2):
        s = fma(s, r, coefficient)
    head = _f32(1) + r
    tail = fma(-n, _LN2_LOW, r_high - (head - _f32(1)))
    p = head + fma(s, r * r, tail)
    exponent = np.where(np.isnan(n), 0, n).astype(np.int32)
    first = (exponent + 254) >> 1  # biased; only the multiplication by the second can round
    second = (exponent + 254) - first
    return (p * (first << 23).astype(np.uint32).view(_f32)) * (second << 23).astype(np.uint32).view(_f32)


def _sigmoid(x):
    return _f32(1) / (_f32(1) + exp_exact(-x))


def _silu(x):
    return x / (_f32(1) + exp_exact(-x))


def _tree(lanes):
    """The xor tree over the last dimension: at stages 16, 8, 4, 2, 1 every lane adds its partner's sum."""
    lane = np.arange(_LANES)
    for stage in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., lane ^ stage]
    return lanes[..., 0]


def _rms(stream, eps):
    """rs of one stream: float4s dealt to 256 threads, trees of 32, eight results in order."""
    quads = stream.reshape(-1, 4)
    x, y, z, w = quads.T
    squares = fma(w, w, fma(z, z, fma(y, y, x * x)))
    sums = np.zeros(_NORM_THREADS, _f32)
    for first in range(0, len(squares), _NORM_THREADS):
        dealt = squares[first : first + _NORM_THREADS]
        sums[: len(dealt)] = sums[: len(dealt)] + dealt
    total = _f32(0)
    for group in _tree(sums.reshape(-1, _LANES)):
        total = total + group
    return _f32(1) / np.sqrt(total / _f32(len(stream)) + eps)


def _rows(weights, activations):
    """Each row's dot: chunks of 8 dealt to 32 lanes, a chunk in element order, a lane's chunks in ascending order."""
    w = weights.reshape(len(weights), -1, _CHUNK)
    x = activations.reshape(-1, _CHUNK)
    dots = w[:, :, 0] * x[:, 0]
    for element in range(1, _CHUNK):
        dots = fma(w[:, :, element], x[:, element], dots)
    sums = np.zeros((len(weights), _LANES), _f32)
    for first in range(0, dots.shape[1], _LANES):
        dealt = dots[:, first : first + _LANES]
        sums[:, : dealt.shape[1]] = sums[:, : dealt.shape[1]] + dealt
    return _tree(sums)


def half_exact(value):
    """float32 to half, nearest even, limited to +-65504, one NaN."""
    with np.errstate(over="ignore"):
        half = np.asarray(value, _f32).astype(np.float16)
    half = np.where(np.isinf(half), np.copysign(np.float16(65504), half), half).view(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7E00), half)


def quantise_exact(mixed):
    """q8_1 bytes (blocks, 36) of one token's `mixed`."""
    blocks = mixed.reshape(-1, 32)
    amax_bits = (blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(-1)
    d = amax_bits.view(_f32) / _f32(127)
    usable = (amax_bits < 0x7F800000) & (d != 0)
    ratio = np.where(usable[:, None], blocks, _f32(0)) / np.where(usable, d, _f32(1))[:, None]
    away = np.floor(np.abs(ratio).astype(np.float64) + 0.5)  # roundf: halves away from zero
    q = np.copysign(np.minimum(away, 127), ratio).astype(np.int8)
    nan = amax_bits > 0x7F800000
    image = np.empty((len(blocks), 36), np.uint8)
    image[:, 0:2] = np.where(nan, np.uint16(0x7E00), half_exact(d)).astype("<u2")[:, None].view(np.uint8)
    image[:, 2:4] = np.where(nan, np.uint16(0x7E00), half_exact(_tree(blocks))).astype("<u2")[:, None].view(np.uint8)
    image[:, 4:] = q.view(np.uint8)
    return image


def _widened(weights):
    bits = weights.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return (bits.astype(np.uint32) << np.uint32(16)).view(_f32)


def _stream(tensor):
    tensor = tensor.cpu().contiguous()
    return _widened(tensor) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _upper_halves(tensor):
    """A float32 tensor whose values bfloat16 has, NaNs bit for bit (which torch's own conversion does not keep)."""
    return (tensor.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _bfloat16(value):
    """float32 to the nearest bfloat16, even at ties, as float32.

    A bfloat16 has 8 significant bits and float32's exponents, so a step is 2^-7 of a value's power of two, or 2^-133.
    Steps are counted in float64, where nothing rounds but rint, which goes to even.
    """
    wide = np.asarray(value, _f32).astype(np.float64)
    _, exponent = np.frexp(wide)
    step = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    rounded = np.where(np.isfinite(wide), np.rint(wide / step) * step, wide)
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, wide), rounded).astype(_f32)


def _canonical(value):
    return np.where(np.isnan(value), np.uint32(0x7FC00000).view(_f32), value)


def read_exact(
    residual, w_norm, w_down, w_up, w_inject=None, block_out=None, inject_prev=None, *, eps=1e-6, q8_1=False
):
    """The arithmetic contract in NumPy float32, one operation of the contract for one operation here.

    About two seconds a token at 2560/4/320. `q8_1` is the uint8 image. Where the contract's text could be read in two
    ways, this is the reading:

    * A sum that "starts at +0" adds its first term to +0, so that a lane whose only dot is -0 brings +0.
    * Lanes and norm threads without a chunk or a float4 take part in the tree with +0.
    * A division by HC or N is one, by the fp32 value; it is no multiplication by a reciprocal (HC = 3, N = 96).
    * `inject` is the row's sum itself; only `lo` is divided by HC.
    * The q8_1 sum s is that of the unquantised values, in a tree that does not start at +0. Where finite values
      overflow in it, s is limited to +-65504, or is NaN where the tree meets inf - inf, though no value is either.
    * -0 stays -0 in every float output; q = 0 has no sign.
    * A negative eps is refused as given, before it is rounded to fp32; -0 and what rounds to +inf are taken.
    * R' of bfloat16 streams is rounded from the fp32 result of the fold's fma, and only where a write is pending.
    """
    shape = residual.shape
    streams, width = shape[-2:]
    stream_dtype = residual.dtype
    residual = _stream(residual).reshape(-1, streams, width)
    gain, down, up = w_norm.cpu().numpy(), _widened(w_down), _widened(w_up)
    inject_rows = None if w_inject is None else _widened(w_inject)
    hc = _f32(streams)
    tokens = []
    with np.errstate(all="ignore"):
        eps = _f32(eps)
        for token in range(len(residual)):
            stream = residual[token]
            if block_out is not None:
                block = _stream(block_out).reshape(-1, width)[token]
                logits = inject_prev.cpu().contiguous().numpy().reshape(-1, streams)[token]
                stream = fma(block, (_f32(2) * _sigmoid(logits / hc))[:, None], stream)
                if stream_dtype == torch.bfloat16:
                    stream = _bfloat16(stream)
            rs = np.array([_rms(stream[c], eps) for c in range(streams)], _f32)
            normed = (stream * gain) * rs[:, None]
            lo = _silu(_rows(down, normed.reshape(-1)) / hc)
            gate = _sigmoid(_rows(up, lo)).reshape(streams, width)
            mixed = normed[0] * gate[0]
            for c in range(1, streams):
                mixed = fma(normed[c], gate[c], mixed)
            mixed = _canonical(mixed / hc)
            inject = None if w_inject is None else _canonical(_rows(inject_rows, normed.reshape(-1)))
            folded = None if block_out is None else _canonical(stream)
            image = quantise_exact(mixed) if q8_1 else None
            tokens.append((mixed, inject, folded, _canonical(lo), _canonical(rs), image))

    def stacked(index, asked, *ending, dtype=_f32):
        if not asked:
            return None
        rows = np.stack([t[index] for t in tokens]) if tokens else np.empty((0, *ending), dtype)
        return torch.from_numpy(rows.reshape(*shape[:-2], *ending))

    folded = stacked(2, block_out is not None, streams, width)
    return Read(
        stacked(0, True, width),
        stacked(1, w_inject is not None, streams),
        _upper_halves(folded) if folded is not None and stream_dtype == torch.bfloat16 else folded,
        stacked(3, True, w_down.shape[0]),
        stacked(4, True, streams),
        stacked(5, q8_1, width // 32, 36, dtype=np.uint8),
    )
