"""What the op is timed beside: the same read in plain PyTorch, eager and compiled, and in Triton.

The maths is that of Hugging Face's ``Qwen4ExpTextGatedResidual`` with the pending write folded in front, as a model
that uses PyTorch alone would run it: streams and weights in one dtype, RMS norm in fp32.
"""

import importlib.util

import torch


def eager_read(residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev, eps=1e-6):
    """``residual`` (T, HC, N), ``block_out`` (T, N), ``inject_prev`` (T, HC), weights: one dtype; ``w_norm`` fp32."""
    tokens, streams, width = residual.shape
    gain = 2 * torch.sigmoid(inject_prev / streams)
    residual = residual + block_out.unsqueeze(1) * gain.unsqueeze(2)
    x = residual.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    normalised = (x * w_norm).to(residual.dtype).view(tokens, streams * width)
    lo = torch.nn.functional.silu(torch.nn.functional.linear(normalised, w_down) / streams)
    gate = torch.sigmoid(torch.nn.functional.linear(lo, w_up)).view(tokens, streams, width)
    mixed = (gate * normalised.view(tokens, streams, width)).mean(1)
    inject = torch.nn.functional.linear(normalised, w_inject)
    return mixed, inject, residual


class Peer:
    """One way to run the read in PyTorch; ``arguments(set)`` turns a weight set and inputs into its own dtype."""

    def __init__(self, name: str, dtype: torch.dtype, compile_mode: str | None = None):
        self.name = name
        self.dtype = dtype
        self.call = eager_read
        if compile_mode is not None:
            self.call = torch.compile(eager_read, mode=compile_mode, fullgraph=True, dynamic=False)

    def arguments(self, inputs: dict, weights: dict) -> tuple:
        """The positional arguments of :func:`eager_read`, converted once, outside the timing."""
        cast = {k: v.to(self.dtype) for k, v in {**inputs, **weights}.items() if k != "w_norm"}
        return (
            cast["residual"], weights["w_norm"], cast["w_down"], cast["w_up"], cast["w_inject"], cast["block_out"],
            cast["inject_prev"],
        )  # fmt: skip


class TritonPeer(Peer):
    """Three Triton kernels (triton_peer.py): fp32 streams and sums, bf16 weights, as strata_ops has them."""

    def __init__(self):
        from triton_peer import triton_read

        super().__init__("triton", torch.float32)
        self.call = triton_read

    def arguments(self, inputs: dict, weights: dict) -> tuple:
        """As they are; streams in fp32."""
        streams = {k: v.float() for k, v in inputs.items()}
        return (
            streams["residual"], weights["w_norm"], weights["w_down"], weights["w_up"], weights["w_inject"],
            streams["block_out"], streams["inject_prev"],
        )  # fmt: skip


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def overlapping_copy():
    """``copy(target, source)`` behind which an overlapping launch begins at once; None where there is none."""
    if not has_triton() or torch.cuda.get_device_capability() < (9, 0):
        return None
    from triton_peer import overlapping_copy

    return overlapping_copy


def triton_peers(tokens: int) -> list[Peer]:
    """The Triton peer on a card, where Triton is installed; it unrolls its tokens, so for a few of them only."""
    return [TritonPeer()] if tokens <= 8 and has_triton() else []


def peers(compiled: bool, max_autotune: bool = False) -> list[Peer]:
    """Eager in both dtypes, and compiled too where that was asked for."""
    found = [Peer("eager_bf16", torch.bfloat16), Peer("eager_fp32", torch.float32)]
    if compiled:
        torch.compiler.reset()  # each number of tokens is compiled for itself, and only eight versions are allowed
        mode = "max-autotune-no-cudagraphs" if max_autotune else "default"
        found += [Peer("compile_bf16", torch.bfloat16, mode), Peer("compile_fp32", torch.float32, mode)]
    return found
