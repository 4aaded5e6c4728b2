"""The read as one would write it in Triton: three kernels, fp32 sums, bf16 weights, fp32 streams.

A peer for the benchmark and no more: sums in any order, Triton's own exp, no q8_1, and only the model's geometry.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _norm(residual, block_out, inject_prev, w_norm, residual_out, normalised, eps, WIDTH: tl.constexpr,
          STREAMS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token, stream = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    there = d < WIDTH
    row = (token * STREAMS + stream) * WIDTH
    gain = 2 * tl.sigmoid(tl.load(inject_prev + token * STREAMS + stream) / STREAMS)
    value = tl.load(residual + row + d, there, 0.0) + gain * tl.load(block_out + token * WIDTH + d, there, 0.0)
    tl.store(residual_out + row + d, value, there)
    rs = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
    tl.store(normalised + row + d, value * tl.load(w_norm + stream * WIDTH + d, there, 0.0) * rs, there)


@triton.jit
def _down(normalised, w_down, w_inject, lo, inject, tokens, TOKENS: tl.constexpr, DEPTH: tl.constexpr,
          RANK: tl.constexpr, STREAMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * ROWS
    is_inject = first >= RANK
    weights = tl.where(is_inject, w_inject, w_down)
    row_of_all = first + tl.arange(0, ROWS)
    row = tl.where(is_inject, row_of_all - RANK, row_of_all)
    token = tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS, ROWS, BLOCK), tl.float32)
    for k in range(0, DEPTH, BLOCK):
        i = k + tl.arange(0, BLOCK)
        w = tl.load(weights + row[:, None] * DEPTH + i[None, :]).to(tl.float32)
        x = tl.load(normalised + token[:, None] * DEPTH + i[None, :], token[:, None] < tokens, 0.0)
        total += w[None, :, :] * x[:, None, :]
    s = tl.sum(total, 2)
    x = s / STREAMS
    there = (token < tokens)[:, None]
    tl.store(lo + token[:, None] * RANK + row[None, :], x * tl.sigmoid(x), there & (row_of_all < RANK)[None, :])
    tl.store(inject + token[:, None] * STREAMS + row[None, :], s, there & (row_of_all >= RANK)[None, :])


@triton.jit
def _up(normalised, lo, w_up, mixed, tokens, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STREAMS: tl.constexpr,
        RANK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, BLOCK)
    token = tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for stream in tl.static_range(STREAMS):
        row = stream * WIDTH + column
        w = tl.load(w_up + row[:, None] * RANK + r[None, :], (r < RANK)[None, :], 0.0).to(tl.float32)
        for t in tl.static_range(TOKENS):
            here = tl.minimum(tokens - t, 1)  # 1 for the tokens that there are, else at most 0
            x = tl.load(lo + t * RANK + r, r < here * RANK, 0.0)
            gate = tl.sigmoid(tl.sum(w * x[None, :], 1))
            value = tl.load(normalised + (t * STREAMS + stream) * WIDTH + column, column < here * WIDTH, 0.0)
            total += tl.where(token[:, None] == t, (gate * value)[None, :], 0.0)
    tl.store(mixed + token[:, None] * WIDTH + column[None, :], total / STREAMS, (token < tokens)[:, None])


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, i < count), i < count)


def overlapping_copy(target: torch.Tensor, source: torch.Tensor):
    """``target.copy_(source)`` that lets a launch which may overlap begin at once (NVIDIA from sm_90 on)."""
    _copy[(triton.cdiv(target.numel(), 1024),)](source, target, target.numel(), 1024)


def triton_read(residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev, eps=1e-6):
    """``residual`` (T, HC, N), ``block_out`` (T, N), ``inject_prev`` (T, HC), ``w_norm`` fp32; other weights bf16."""
    tokens, streams, width = residual.shape
    rank, depth = w_down.shape
    residual_out, normalised = torch.empty_like(residual), torch.empty_like(residual)
    lo = residual.new_empty(tokens, rank)
    inject, mixed = residual.new_empty(tokens, streams), residual.new_empty(tokens, width)
    _norm[(tokens, streams)](residual, block_out, inject_prev, w_norm, residual_out, normalised, eps, width, streams,
                             triton.next_power_of_2(width), num_warps=8)  # fmt: skip
    held = triton.next_power_of_2(tokens)
    rows, columns = 2, 16
    _down[((rank + streams) // rows,)](normalised, w_down, w_inject, lo, inject, tokens, held, depth, rank, streams,
                                       rows, 1024, num_warps=8)  # fmt: skip
    _up[(width // columns,)](normalised, lo, w_up, mixed, tokens, held, width, streams, rank, columns,
                             triton.next_power_of_2(rank), num_warps=4)  # fmt: skip
    return mixed, inject, residual_out
