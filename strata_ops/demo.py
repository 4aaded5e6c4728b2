"""A real read on made-up weights that look like a checkpoint's: what comes out, and how long it takes.

The weights of several blocks are read in turn, as a model does, so that they come from memory and not from a cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._inputs import MODEL, Inputs, make_inputs
from .ops import FusedGrRead, fused_gr_read

TOKENS = (1, 4)
WEIGHT_SETS = {"cpu": 10, "cuda": 40}  # 13 MB each
ROUNDS = {"cpu": 8, "cuda": 20}


def eager_read(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """The same maths as anybody would write it in PyTorch: mixed, inject, residual_out."""
    residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev = inputs
    streams = residual.shape[-2]
    if block_out is not None and inject_prev is not None:
        residual = residual + block_out.unsqueeze(-2) * (2 * torch.sigmoid(inject_prev / streams)).unsqueeze(-1)
    normed = F.rms_norm(residual, residual.shape[-1:], eps=1e-6).mul(w_norm).to(dtype)
    flat = normed.flatten(-2)
    gate = torch.sigmoid(F.linear(F.silu(F.linear(flat, w_down) / streams), w_up))
    mixed = (normed * gate.view_as(normed)).mean(-2)
    return mixed, None if w_inject is None else F.linear(flat, w_inject), residual


def _with_weights(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Copies of the weights; the activations are shared."""
    assert inputs.w_inject is not None
    copies = [w.to(dtype, copy=True) for w in (inputs.w_down, inputs.w_up, inputs.w_inject)]
    return inputs._replace(w_norm=inputs.w_norm.clone(), w_down=copies[0], w_up=copies[1], w_inject=copies[2])


def _microseconds_cpu(runs: list[list[Callable[[], object]]], rounds: int) -> list[float]:
    """Each call's best time of some rounds, and of those the median over a list's calls.

    The lists take turns, so that a busy machine slows all alike.
    """
    best = [[math.inf] * len(calls) for calls in runs]
    for _ in range(rounds):
        for calls, mine in zip(runs, best, strict=True):
            for i, call in enumerate(calls):
                start = time.perf_counter()
                call()
                mine[i] = min(mine[i], time.perf_counter() - start)
    return [statistics.median(mine) * 1e6 for mine in best]


def _microseconds_gpu(runs: list[list[Callable[[], object]]], rounds: int) -> list[float]:
    """The time of a call within a replayed graph of each list's calls: the card's time, without Python's."""
    results = []
    for calls in runs:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            calls[0]()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
        results.append(statistics.median(times))
    return results


def _values(tensor: Tensor) -> str:
    return " ".join(f"{value:+.4f}" for value in tensor.flatten()[:4].tolist())


def _outputs(inputs: Inputs, read: FusedGrRead) -> list[str]:
    """A line an output: its size, first values, and how far it is from float64."""
    from . import reference

    truth, bounds = reference.read_fp64(*inputs), reference.tolerance(*inputs)
    lines = [f"    {'output':<14}{'shape':<16}{'rms':>9}  {'first values':<33}{'off fp64':>9}  allowed"]
    for name in ("mixed", "inject", "residual_out", "lo", "rs"):
        value = getattr(read, name)
        if value is None:
            continue
        value = value.cpu()
        error = (value.double() - getattr(truth, name)).abs().max().item()
        verdict = "ok" if error <= bounds[name] else "TOO FAR"
        lines.append(
            f"    {name:<14}{tuple(value.shape)!s:<16}{value.square().mean().sqrt().item():>9.4f}  "
            f"{_values(value):<33}{error:>9.1e}  {bounds[name]:.1e} {verdict}"
        )
    return lines


@torch.inference_mode()
def demo(device: str, say: Callable[[str], None] = print) -> None:
    """Reads T = 1 token without, and 4 tokens with a pending write, on one device; says what came out and how fast."""
    place = torch.device(device)
    say(f"{place}: N = {MODEL.width}, HC = {MODEL.streams}, LR = {MODEL.rank}, bf16 weights, 13.2 MB a read")
    for tokens in TOKENS:
        pending = tokens > 1
        here = make_inputs(tokens).only(tokens, fold=pending, inject=True)
        inputs = here.to(place)
        read = fused_gr_read(*inputs)
        say(f"  T = {tokens}, {'with' if pending else 'without'} a pending write")
        for line in _outputs(here, read):
            say(line)
        count = WEIGHT_SETS[place.type]
        narrow = [_with_weights(inputs, torch.bfloat16) for _ in range(count)]
        wide = [_with_weights(inputs, torch.float32) for _ in range(count)]
        runs: list[list[Callable[[], object]]] = [
            [lambda i=i: fused_gr_read(*i) for i in narrow],
            [lambda i=i: eager_read(i, torch.bfloat16) for i in narrow],
            [lambda i=i: eager_read(i, torch.float32) for i in wide],
        ]
        measure = _microseconds_cpu if place.type == "cpu" else _microseconds_gpu
        ours, bf16, fp32 = measure(runs, ROUNDS[place.type])
        how = f"{torch.get_num_threads()} threads" if place.type == "cpu" else "in a replayed CUDA graph"
        say(
            f"    time a read, cold weights, {how}: strata_ops {ours:.1f} us, eager bf16 {bf16:.1f} us "
            f"({bf16 / ours:.1f}x), eager fp32 {fp32:.1f} us ({fp32 / ours:.1f}x)"
        )
