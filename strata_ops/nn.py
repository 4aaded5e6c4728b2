"""The gated residual as a module: a checkpoint's parameters, Transformers' results, the op underneath.

import strata_ops.nn
read = strata_ops.nn.GatedResidual.from_config(config)   # or .from_transformers(module), or GatedResidual(2560, ...)
read.load_state_dict(...)
mixed, hyper_input, injection_weights = read(hyper_input)
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _core
from .ops import fused_gr_read

Prefill = Literal["exact", "library"]
Module = TypeVar("Module", bound="GatedResidual")
_Weights = tuple[Tensor, Tensor, Tensor, Tensor | None]  # the op's: w_norm, w_down, w_up, w_inject

_LINEARS = ("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight")


class GatedRead(NamedTuple):
    """What `GatedResidual.read` gives; `...` are the leading dimensions of `hyper_input`."""

    mixed: Tensor
    """(..., N) in the streams' dtype: the block's input."""
    hyper_input: Tensor
    """(..., HC*N) in the streams' dtype: the streams with the pending write; the input itself where none was given."""
    inject: Tensor | None
    """(..., HC) float32: the raw logits of this read's own write, the next read's `inject_prev`. None without rows."""


def injection_weights(inject: Tensor, dtype: torch.dtype) -> Tensor:
    """What a block's output is multiplied by when it is written into each stream: 2*sigmoid(logit / HC).

    From the raw logits (..., HC) in float32; computed in float32 and rounded to `dtype` once.
    """
    return (2 * torch.sigmoid(inject / inject.shape[-1])).to(dtype)


class _CentredGain(nn.Module):
    """Holds `hc_norm.weight`, the norm's gain less 1."""

    def __init__(self, depth: int, device: torch.device | str | None, dtype: torch.dtype | None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(depth, device=device, dtype=dtype))


class GatedResidual(nn.Module):
    """The read of the residual streams, with the parameters of Transformers' `Qwen4ExpTextGatedResidual`.

    Names and shapes are the checkpoint's, so a `state_dict` goes either way: with N = hidden_size, HC = hc_count,
    D = HC*N and LR = hc_lowrank

        hc_norm.weight                  (D,)      centred at zero: the full gain is 1 + weight, taken in float32
        input_mix_weight_down.weight    (LR, D)
        input_mix_weight_up.weight      (D, LR)
        block_inject_weight.weight      (HC, D)   only with use_combine

    Two forms: calling the module gives what Transformers' module gives, and `read` takes the write of the block before
    along, which saves the passes over the streams that landing it by itself costs.

    The op reads bf16 weights. Parameters in bf16 are read where they lie; of others a bf16 copy is kept, and refused
    where that would change a value, unless `round_weights` is set. The copy and the full gain are made again, in place
    where they fit, when a parameter has been changed, replaced or moved; a call with unchanged parameters copies none.
    A compiled graph or a captured one cannot look: call `prepare` after a change.

    Rounding, against Transformers' module with the same weights:

    * float32: only the order of the sums differs (`strata_ops.reference.tolerance` bounds it).
    * bfloat16: Transformers rounds after the norm, each projection, silu, sigmoid, product and mean. Here all of that
      is float32, and `mixed` and the injection weights are rounded once. Of the pending write, Transformers rounds the
      weight, the product and the sum; `read` rounds the sum alone.

    Where a gradient is wanted (so export under torch.no_grad()), and for prefill="library" on more than 8 tokens, the
    same maths runs in PyTorch's own operations, with Transformers' order and rounding, on the parameters as they are.

    Args:
        hidden_size: N, a multiple of 32.
        hc_count: HC, 1 to 8 streams.
        hc_lowrank: LR, a multiple of 8.
        eps: added to the mean square of a stream.
        use_combine: whether the read also gives the weights of its block's write.
        prefill: "exact" reads any number of tokens by the op, so that a token's result does not depend on the others;
            "library" leaves calls of more than 8 tokens to matrix products of the library, which are faster there.
        round_weights: round weights that bf16 does not hold, instead of refusing them. It moves results.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        RuntimeError: a geometry that the op does not take; and, from a call, weights that bf16 does not hold, or
            streams that are neither float32 nor bfloat16, or of another width.
    """

    hc_norm: Any  # ours, or Transformers' own
    input_mix_weight_down: nn.Linear
    input_mix_weight_up: nn.Linear
    block_inject_weight: nn.Linear | None
    _full_gain: Tensor | None
    _narrow_down: Tensor | None
    _narrow_up: Tensor | None
    _narrow_inject: Tensor | None
    _prepared_from: list[Tensor]
    _fingerprint_then: list[tuple[Any, ...]] | None
    _prepared: _Weights | None

    def __init__(
        self,
        hidden_size: int,
        hc_count: int = 4,
        hc_lowrank: int = 320,
        *,
        eps: float = 1e-6,
        use_combine: bool = True,
        prefill: Prefill = "exact",
        round_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_geometry(hidden_size, hc_count, hc_lowrank, eps)
        if prefill not in ("exact", "library"):
            raise RuntimeError(f"GatedResidual: prefill is '{prefill}'; use 'exact' or 'library'")
        self.hidden_size, self.hc_count, self.hc_lowrank = hidden_size, hc_count, hc_lowrank
        self.eps, self.prefill, self.round_weights = eps, prefill, round_weights
        depth = hidden_size * hc_count

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.hc_norm = _CentredGain(depth, device, dtype)
        self.input_mix_weight_down = linear(depth, hc_lowrank)
        self.input_mix_weight_up = linear(hc_lowrank, depth)
        self.block_inject_weight = linear(depth, hc_count) if use_combine else None
        for name in ("_full_gain", "_narrow_down", "_narrow_up", "_narrow_inject"):
            self.register_buffer(name, None, persistent=False)
        self._forget()

    @classmethod
    def from_config(cls: type[Module], config: Any, use_combine: bool = True, **options: Any) -> Module:
        """A module with fresh parameters for a `Qwen4ExpTextConfig`; `options` are the constructor's."""
        options.setdefault("eps", config.rms_norm_eps)
        return cls(config.hidden_size, config.hc_count, config.hc_lowrank, use_combine=use_combine, **options)

    @classmethod
    def from_transformers(cls: type[Module], module: Any, **options: Any) -> Module:
        """A module that shares submodules and parameters with a `Qwen4ExpTextGatedResidual`.

        `options` are the constructor's.

        Raises:
            RuntimeError: what `module` is made of is not what the checkpoint has (quantised or sharded weights, for
                example), or bf16 does not hold its weights.
        """
        use_combine = getattr(module, "block_inject_weight", None) is not None
        try:
            geometry = (module.hidden_size, module.hc_count, module.input_mix_weight_down.out_features)
            eps = module.hc_norm.eps
        except AttributeError as error:
            kind = type(module).__name__
            raise RuntimeError(f"GatedResidual: a Qwen4ExpTextGatedResidual is wanted, not a {kind}: {error}") from None
        options = {"eps": eps, **options, "use_combine": use_combine, "device": "meta"}
        made = cls(*geometry, **options)
        made.share(module)
        made.train(module.training)
        made.prepare()
        return made

    def share(self, module: Any) -> None:
        """Takes over the submodules of a module with the same names and shapes; both have the same ones then."""
        mine: Any
        for name, mine in list(self.named_children()):
            theirs = getattr(module, name)
            if name in _LINEARS and type(theirs) is not nn.Linear:
                raise RuntimeError(f"GatedResidual: '{name}' is a {type(theirs).__name__}; only nn.Linear can be read")
            weight, expected = theirs._parameters.get("weight"), tuple(mine.weight.shape)
            if type(weight) is not nn.Parameter or tuple(weight.shape) != expected:
                found = type(weight).__name__ if weight is None else f"{type(weight).__name__} {tuple(weight.shape)}"
                raise RuntimeError(f"GatedResidual: '{name}.weight' is {found}; a Parameter {expected} was expected")
            setattr(self, name, theirs)
        self._forget()

    def forward(self, hyper_input: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Reads streams (..., HC*N), float32 or bfloat16; results have that dtype.

        Returns:
            `mixed` (..., N) alone without use_combine, else `mixed`, `hyper_input` itself, and the injection weights
            (..., HC), by which the block's output is multiplied before it is added to each stream.
        """
        if not self.reads_by_op(hyper_input):
            return self._by_library(hyper_input)
        mixed, _, inject = self.read(hyper_input)
        return mixed if inject is None else (mixed, hyper_input, injection_weights(inject, hyper_input.dtype))

    def read(
        self, hyper_input: Tensor, block_out: Tensor | None = None, inject_prev: Tensor | None = None
    ) -> GatedRead:
        """Reads streams (..., HC*N) after the write of the block before: always the op, its gradients too.

        (Gradients of parameters that are not bf16 are rounded to it on their way.)

        Args:
            hyper_input: (..., HC*N) float32 or bfloat16, the streams before that write.
            block_out: (..., N) in the same dtype, what the block gave, or None: no write is pending.
            inject_prev: (..., HC) float32, `inject` of the read that fed that block; given where `block_out` is.
        """
        if hyper_input.shape[-1] != self.hc_count * self.hidden_size:
            raise RuntimeError(
                f"GatedResidual: hyper_input has {hyper_input.shape[-1]} features; "
                f"{self.hc_count} streams of {self.hidden_size} were expected"
            )
        streams = hyper_input.unflatten(-1, (self.hc_count, self.hidden_size))
        read = fused_gr_read(streams, *self._weights(), block_out, inject_prev, eps=self.eps)
        written = hyper_input if read.residual_out is None else read.residual_out.flatten(-2)
        return GatedRead(read.mixed.to(hyper_input.dtype), written, read.inject)

    def reads_by_op(self, hyper_input: Tensor) -> bool:
        """Whether a call with these streams takes the op, and not PyTorch's own operations."""
        if self._learns() or (torch.is_grad_enabled() and hyper_input.requires_grad):
            return False
        return self.prefill == "exact" or hyper_input.shape[:-1].numel() <= _core.MAX_TOKENS

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare(self) -> None:
        """Makes what the op reads out of the parameters. A call does it by itself, except in a compiled graph."""
        with torch.inference_mode(False), torch.no_grad():
            gain = 1 + self.hc_norm.weight.float().view(self.hc_count, self.hidden_size)
            self._keep("_full_gain", gain)
            for buffer, name in zip(("_narrow_down", "_narrow_up", "_narrow_inject"), _LINEARS):
                linear = getattr(self, name)
                self._keep(buffer, None if linear is None else self._narrowed(f"{name}.weight", linear.weight))
            # Detached aliases: as long as they are held, no other tensor can come to lie at the same address.
            self._prepared_from = [weight.detach() for weight in self._parameters_now()]
            self._fingerprint_then = self._fingerprint()
            self._prepared = self._as_prepared()

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, hc_count={self.hc_count}, hc_lowrank={self.hc_lowrank}, eps={self.eps}, "
            f"prefill='{self.prefill}'"
        )

    def _parameters_now(self) -> list[Tensor]:
        holders: list[Any] = [module for module in self._modules.values() if module is not None]
        return [holder._parameters["weight"] for holder in holders]

    def _fingerprint(self) -> list[tuple[Any, ...]]:
        """Changes when a parameter is written to (where it was not made in inference mode), replaced or moved."""
        return [
            (w.data_ptr(), 0 if w.is_inference() else w._version, w.dtype, w.device) for w in self._parameters_now()
        ]

    def _weights(self) -> _Weights:
        compiling = torch.compiler.is_compiling()
        if self._prepared is None or (not compiling and self._fingerprint_then != self._fingerprint()):
            self.prepare()
            assert self._prepared is not None
        if self._learns():
            inject = self.block_inject_weight
            return (
                1 + self.hc_norm.weight.float().view(self.hc_count, self.hidden_size),
                self.input_mix_weight_down.weight.bfloat16(),
                self.input_mix_weight_up.weight.bfloat16(),
                None if inject is None else inject.weight.bfloat16(),
            )
        return self._as_prepared() if compiling else self._prepared

    def _as_prepared(self) -> _Weights:
        """By name, so that a compiler sees parameters and buffers, whose addresses it may rely on."""
        inject = self.block_inject_weight
        assert self._full_gain is not None
        return (
            self._full_gain,
            self.input_mix_weight_down.weight if self._narrow_down is None else self._narrow_down,
            self.input_mix_weight_up.weight if self._narrow_up is None else self._narrow_up,
            None if inject is None else inject.weight if self._narrow_inject is None else self._narrow_inject,
        )

    def _learns(self) -> bool:
        return torch.is_grad_enabled() and any(weight.requires_grad for weight in self._parameters_now())

    def _narrowed(self, name: str, weight: Tensor) -> Tensor | None:
        """A copy that the op can read, or None where it can read the parameter itself."""
        if weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.data_ptr() % _core.ALIGNMENT == 0:
            return None
        if weight.is_meta:
            raise RuntimeError(f"GatedResidual: '{name}' is on the meta device; load the weights first")
        narrow = weight.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
        if not self.round_weights and not torch.equal(narrow.to(weight.dtype), weight):
            raise RuntimeError(
                f"GatedResidual: bfloat16 does not hold '{name}' exactly, and the op reads bf16 weights; "
                "round_weights=True rounds them, which moves the results"
            )
        return narrow

    def _keep(self, name: str, value: Tensor | None) -> None:
        """Into the old tensor where it fits: a captured graph then sees the new values."""
        old = getattr(self, name)
        if old is not None and value is not None and (old.shape, old.device) == (value.shape, value.device):
            old.copy_(value)
        else:
            setattr(self, name, value)

    def _forget(self) -> None:
        self._full_gain = self._narrow_down = self._narrow_up = self._narrow_inject = None
        self._prepared_from = []
        self._fingerprint_then = None
        self._prepared = None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._forget()  # what was derived is not converted but made anew
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _by_library(self, hyper_input: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        streams = (self.hc_count, self.hidden_size)
        wide = hyper_input.float().unflatten(-1, streams)
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)
        normed = (normed * (1 + self.hc_norm.weight.float())).to(hyper_input.dtype)
        lo = F.silu(self.input_mix_weight_down(normed) / self.hc_count)
        gate = torch.sigmoid(self.input_mix_weight_up(lo)).unflatten(-1, streams)
        mixed: Tensor = (gate * normed.unflatten(-1, streams)).mean(-2)
        if self.block_inject_weight is None:
            return mixed
        return mixed, hyper_input, 2 * torch.sigmoid(self.block_inject_weight(normed) / self.hc_count)


def _check_geometry(width: int, streams: int, rank: int, eps: float) -> None:
    """The op's own checks and words, on tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    depth = width * streams
    fused_gr_read(
        empty(1, streams, width, dtype=torch.float32),
        empty(streams, width, dtype=torch.float32),
        empty(rank, depth, dtype=torch.bfloat16),
        empty(depth, rank, dtype=torch.bfloat16),
        eps=eps,
    )
