"""What the tests share: inputs, the list of what can run, and comparison by bytes."""

import functools
import itertools
import os
from typing import NamedTuple

import pytest
import torch

from strata_ops.reference import Read, read_exact

MODEL = (2560, 4, 320)
# Every remainder matters somewhere: more float4s than norm threads, lanes with more chunks than others, one chunk in
# all, a division by a number that is no power of two, most streams, and the default of Transformers' configuration.
GEOMETRIES = [(2048, 4, 320), (32, 1, 8), (96, 3, 24), (64, 8, 40), (1056, 2, 264), (64, 5, 8), (160, 7, 320)]
SMALL = (96, 3, 24)
TOKENS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17]
OPTIONS = list(itertools.product([False, True], repeat=3))  # fold, inject, q8_1


class Inputs(NamedTuple):
    residual: torch.Tensor
    w_norm: torch.Tensor
    w_down: torch.Tensor
    w_up: torch.Tensor
    w_inject: torch.Tensor | None = None
    block_out: torch.Tensor | None = None
    inject_prev: torch.Tensor | None = None

    def ask(self, *, fold=True, inject=True):
        """The same inputs without what is not wanted."""
        return self._replace(
            w_inject=self.w_inject if inject else None,
            block_out=self.block_out if fold else None,
            inject_prev=self.inject_prev if fold else None,
        )

    def tokens(self, index):
        """The same weights with some of the tokens."""
        return self._replace(
            residual=self.residual[index],
            block_out=None if self.block_out is None else self.block_out[index],
            inject_prev=None if self.inject_prev is None else self.inject_prev[index],
        )

    def bf16_streams(self):
        """The same inputs with streams and block output of bf16: the upper halves of their bits, NaNs' too."""

        def halved(t):
            return None if t is None else (t.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)

        return self._replace(residual=halved(self.residual), block_out=halved(self.block_out))

    def map(self, function):
        return Inputs(*(None if t is None else function(t) for t in self))


def make_inputs(geometry=MODEL, tokens=4, seed=0, bits=False):
    """Values like a checkpoint's, or with `bits` any 32 (16) bits at all."""
    width, streams, rank = geometry
    depth = width * streams
    generator = torch.Generator().manual_seed(seed)

    def normal(scale, *shape):
        return torch.randn(shape, generator=generator) * scale

    def anything(dtype, *shape):
        size = {torch.int32: 2**31, torch.int16: 2**15}[dtype]
        return torch.randint(-size, size, shape, generator=generator, dtype=dtype)

    if bits:
        f32 = [(tokens, streams, width), (streams, width), (tokens, width), (tokens, streams)]
        residual, w_norm, block_out, inject_prev = (anything(torch.int32, *s).view(torch.float32) for s in f32)
        bf16 = [(rank, depth), (depth, rank), (streams, depth)]
        w_down, w_up, w_inject = (anything(torch.int16, *s).view(torch.bfloat16) for s in bf16)
        return Inputs(residual, w_norm, w_down, w_up, w_inject, block_out, inject_prev)
    return Inputs(
        residual=normal(2, tokens, streams, width),
        w_norm=1 + normal(0.2, streams, width),
        w_down=normal(1.5 / depth**0.5, rank, depth).bfloat16(),
        w_up=normal(4 / rank**0.5, depth, rank).bfloat16(),
        w_inject=normal(2 / depth**0.5, streams, depth).bfloat16(),
        block_out=normal(1, tokens, width),
        inject_prev=normal(2, tokens, streams),
    )


@functools.cache
def case(geometry=MODEL, fold=True, bf16=False):
    """Some tokens with everything asked for, and their exact result: computed once, cut to size by the tests.

    `bf16`: the streams are of bf16.
    """
    inputs = make_inputs(geometry, 17 if geometry in (MODEL, SMALL) else 9, seed=sum(geometry)).ask(fold=fold)
    inputs = inputs.bf16_streams() if bf16 else inputs
    return inputs, read_exact(*inputs, q8_1=True)


def cut(result, index=slice(None), *, inject=True, q8_1=True):
    """The part of a whole `Read` that another call asks for."""
    asked = result._replace(inject=result.inject if inject else None, q8_1=result.q8_1 if q8_1 else None)
    return Read(*(None if t is None else t[index] for t in asked))


def named(outputs, folded=None):
    """What an op returns, as the Python function names it: six tensors, or five and the stream written in place."""
    outputs = list(outputs)
    if len(outputs) == 5:
        outputs.insert(2, folded)
    return Read(*(None if t is None or t.shape[-1] == 0 else t for t in outputs))


def as_bytes(tensor):
    """The bytes of the values, in logical order; a copy."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def assert_same(actual, expected, what=""):
    """Every output has the expected shape, type and bytes."""
    for name, a, e in zip(Read._fields, actual, expected, strict=True):
        assert (a is None) == (e is None), f"{what} {name}: {'absent' if a is None else 'not asked for'}"
        if e is None:
            continue
        assert (a.shape, a.dtype) == (e.shape, e.dtype), f"{what} {name}: {a.shape} {a.dtype}, not {e.shape} {e.dtype}"
        if torch.equal(as_bytes(a), as_bytes(e)):
            continue
        word = {torch.float32: torch.int32, torch.bfloat16: torch.int16}.get(e.dtype, e.dtype)
        different = (a.cpu().contiguous().view(word) != e.cpu().contiguous().view(word)).nonzero()
        first = tuple(different[0].tolist())
        raise AssertionError(
            f"{what} {name}: {len(different)} of {e.numel()} differ, first at {first}: "
            f"{a[first].item()!r}, not {e[first].item()!r}"
        )


# ----------------------------------------------------------------------------------------------------------------------
# What can run here


class Runner(NamedTuple):
    """One code path of one device."""

    device: str
    variant: str
    q8_columns: int = 0

    def __str__(self):
        columns = f"-{self.q8_columns}" if self.q8_columns else ""
        return f"{self.device}-{self.variant}{columns}"

    def takes(self, geometry):
        return self.device == "cpu" or geometry == MODEL or self.variant == "runtime_geometry"

    def __call__(self, inputs, **options):
        from strata_ops import debug

        moved = inputs.map(lambda t: t.to(self.device))
        return named(debug.fused_gr_read(*moved, variant=self.variant, q8_columns=self.q8_columns, **options))


@functools.cache
def runners():
    from strata_ops import info

    variants = {backend["name"]: backend.get("variants", []) for backend in info()["backends"]}
    found = [Runner("cpu", name) for name in variants["cpu"]]
    if torch.cuda.is_available():
        vendor = "hip" if torch.version.hip else "cuda"
        found += [Runner("cuda", name, columns) for name in variants[vendor] for columns in (16, 32)]
    return found


def devices():
    return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def need_transformers():
    """Transformers' configuration and gated residual; where it has none, the test or the file is left out."""
    try:
        from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
        from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual
    except ImportError as error:
        if os.environ.get("STRATA_REQUIRE_ALL"):
            raise
        pytest.skip(f"left out: needs transformers 5.17 or later ({error})", allow_module_level=True)
    return Qwen4ExpTextConfig, Qwen4ExpTextGatedResidual
