"""Hugging Face Transformers' `qwen4_exp` models with their gated residuals read by the op.

    from strata_ops.integrations.transformers import patch, unpatch
    patch(model)          # model.generate(...) as before; unpatch(model) puts Transformers' own modules back

The layers' code stays Transformers'. It writes a block's output into the streams by

    hyper_input + (hidden_states.unsqueeze(-2) * injection_weights.unsqueeze(-1)).flatten(-2)

and that write is what the next read takes along (the fold). So a patched read hands out injection weights that wait:
the product and the sum with them wait too, and the next patched read finds the parts and gives them to the op. Whoever
else looks at such a tensor (a hook, a layer with n-gram embeddings, `output_hidden_states`) finds its values, computed
then, as Transformers would have. Should a release of Transformers spell the write differently, the same happens: right,
without the fold. Nothing waits under torch.compile, which fuses the write itself, or while gradients are recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..nn import GatedResidual, Prefill, injection_weights

_MULTIPLY = frozenset({Tensor.mul, Tensor.__mul__, torch.mul})
_ADD = frozenset({Tensor.add, Tensor.__add__, torch.add})


def patch(model: nn.Module, *, prefill: Prefill = "exact", round_weights: bool = False) -> nn.Module:
    """Swaps every gated residual of a `qwen4_exp` model for `strata_ops.nn.GatedResidual`, and returns the model.

    Parameters stay the same objects, so `state_dict`, `save_pretrained` and `to` work as before. Inference is read by
    the op; where a gradient is wanted, Transformers' own maths runs. Hooks on the swapped modules stay.

    Args:
        model: a `Qwen4ExpForCausalLM`, `Qwen4ExpForConditionalGeneration`, or any module that holds
            `Qwen4ExpTextGatedResidual`s.
        prefill: "exact" reads every token by the op, so that no read depends on how many tokens are beside it;
            "library" leaves reads of more than 8 tokens to matrix products of the library, which are faster there.
        round_weights: round hyper-connection weights that bf16 does not hold exactly, which moves the logits, instead
            of refusing them. The parameters themselves are not touched.

    Raises:
        RuntimeError: nothing to patch (and what was found), a model that is patched already, or a gated residual that
            the op cannot read: the first one is named, with the reason. The model is then as it was.
    """
    kind = _transformers_module()
    found = _named_children_of(model, kind)
    if not found:
        raise RuntimeError(f"patch: {_describe(model)} has no gated residual to swap; a qwen4_exp model is wanted")
    made = []
    for name, _, _, module in found:
        if hasattr(module, "_hf_hook"):
            raise RuntimeError(
                f"patch: '{name}' is moved about by accelerate (device_map); load the model onto one device first"
            )
        try:
            swapped = PatchedGatedResidual.from_transformers(module, prefill=prefill, round_weights=round_weights)
        except RuntimeError as error:
            raise RuntimeError(f"patch: '{name}': {error}") from None
        swapped.stand_in_for(module)
        made.append(swapped)
    for (_, parent, attribute, _), swapped in zip(found, made, strict=True):
        setattr(parent, attribute, swapped)
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Puts Transformers' own modules back, with the parameters as they are now, and returns the model.

    Raises:
        RuntimeError: the model is not patched.
    """
    found = _named_children_of(model, PatchedGatedResidual)
    if not found:
        raise RuntimeError(f"unpatch: {_describe(model)} is not patched")
    for _, parent, attribute, swapped in found:
        setattr(parent, attribute, swapped.original())
    return model


def _transformers_module() -> type[nn.Module]:
    try:
        from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual
    except ImportError as error:
        raise RuntimeError(f"patch: transformers 5.17 or later is needed ({error})") from None
    return Qwen4ExpTextGatedResidual


def _named_children_of(model: nn.Module, kind: type[nn.Module]) -> list[tuple[str, nn.Module, str, Any]]:
    """Every module of a kind: its full name, its parent, its name there, itself."""
    return [
        (f"{prefix}.{name}".lstrip("."), parent, name, child)
        for prefix, parent in model.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, kind)
    ]


def _describe(model: nn.Module) -> str:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    patched = "patched already, " if _named_children_of(model, PatchedGatedResidual) else ""
    return f"{type(model).__name__} ({patched}model_type {kind!r})"


class PatchedGatedResidual(GatedResidual):
    """A gated residual in a Transformers layer, whose write waits for the next one."""

    def stand_in_for(self, module: nn.Module) -> None:
        """Keeps what is swapped out (in a tuple: it is no submodule), and takes its hooks over."""
        self._original = (module,)
        for name, value in vars(module).items():
            if "_hook" in name:
                object.__setattr__(self, name, value)

    def original(self) -> nn.Module:
        (module,) = self._original
        return module.train(self.training)

    def forward(self, hyper_input: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        streams, block_out, inject_prev = _parts(hyper_input)
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not self.reads_by_op(streams):
            return super().forward(_landed(hyper_input))
        mixed, streams, inject = self.read(streams, block_out, inject_prev)
        return mixed if inject is None else (mixed, streams, _Weights(inject, streams.dtype))


# ----------------------------------------------------------------------------------------------------------------------
# The write that waits: a tensor for each stage of it, with the shape, dtype and device of what it stands for.


class _Waiting(Tensor):
    """Its values are computed, once, when anything but the next stage of the write asks for them."""

    _computed: Tensor | None = None

    @staticmethod
    def _standing_for(cls: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def _compute(self) -> Tensor:
        raise NotImplementedError

    def _landed(self) -> Tensor:
        if self._computed is None:
            self._computed = self._compute()
        return self._computed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 2 and not kwargs:
            if func in _MULTIPLY and _Injection.joins(*args):
                return _Injection(*args)
            if func in _ADD and _Streams.joins(*args):
                return _Streams(*args)
        args, kwargs = pytree.tree_map_only(_Waiting, _landed, (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]  # for what does not come by way of Python


class _Weights(_Waiting):
    """Injection weights (..., HC), or (..., HC, 1) `spread` for the product with a block's output."""

    def __new__(cls, inject: Tensor, dtype: torch.dtype, spread: bool = False) -> Any:
        shape = (*inject.shape, 1) if spread else inject.shape
        return cls._standing_for(cls, shape, dtype, inject.device)

    def __init__(self, inject: Tensor, dtype: torch.dtype, spread: bool = False):
        self.inject, self.rounded_to, self.spread = inject, dtype, spread

    def unsqueeze(self, dim: int) -> Tensor:
        if dim == -1 and not self.spread and self._computed is None:
            return _Weights(self.inject, self.rounded_to, spread=True)
        return _landed(self).unsqueeze(dim)

    def _compute(self) -> Tensor:
        weights = injection_weights(self.inject, self.rounded_to)
        return weights.unsqueeze(-1) if self.spread else weights


class _Injection(_Waiting):
    """A block's output (..., 1, N) times `spread` weights: (..., HC, N), or `flat` (..., HC*N)."""

    @staticmethod
    def joins(block: Any, weights: Any) -> bool:
        return (
            type(block) is Tensor
            and type(weights) is _Weights
            and weights.spread
            and weights._computed is None
            and block.dtype == weights.rounded_to
            and block.device == weights.inject.device
            and block.shape[-2:-1] == (1,)
            and block.shape[:-2] == weights.inject.shape[:-1]
        )

    def __new__(cls, block: Tensor, weights: _Weights, flat: bool = False) -> Any:
        *lead, streams = weights.inject.shape
        width = block.shape[-1]
        shape = (*lead, streams * width) if flat else (*lead, streams, width)
        return cls._standing_for(cls, shape, block.dtype, block.device)

    def __init__(self, block: Tensor, weights: _Weights, flat: bool = False):
        self.block, self.weights, self.flat = block, weights, flat

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        if (start_dim, end_dim) == (-2, -1) and not self.flat and self._computed is None:
            return _Injection(self.block, self.weights, flat=True)
        return _landed(self).flatten(start_dim, end_dim)

    def _compute(self) -> Tensor:
        product = self.block * _landed(self.weights)
        return product.flatten(-2) if self.flat else product


class _Streams(_Waiting):
    """Streams (..., HC*N) with a write that has not landed."""

    @staticmethod
    def joins(streams: Any, injection: Any) -> bool:
        if not (type(streams) is Tensor and type(injection) is _Injection and injection._computed is None):
            return False
        *lead, count = injection.weights.inject.shape
        block = injection.block
        return (
            injection.flat
            and streams.shape == (*lead, count * block.shape[-1])
            and (streams.dtype, streams.device) == (block.dtype, block.device)
        )

    def __new__(cls, streams: Tensor, injection: _Injection) -> Any:
        return cls._standing_for(cls, streams.shape, streams.dtype, streams.device)

    def __init__(self, streams: Tensor, injection: _Injection):
        self.streams, self.injection = streams, injection

    def _compute(self) -> Tensor:
        return self.streams + _landed(self.injection)


def _landed(tensor: Tensor) -> Tensor:
    return tensor._landed() if isinstance(tensor, _Waiting) else tensor


def _parts(hyper_input: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Streams, block_out and inject_prev: the last two None where no write waits."""
    if type(hyper_input) is not _Streams or hyper_input._computed is not None:
        return _landed(hyper_input), None, None
    injection = hyper_input.injection
    return hyper_input.streams, injection.block.squeeze(-2), injection.weights.inject
