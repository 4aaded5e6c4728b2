"""The oracles against each other, and against arithmetic that shares nothing with them."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from strata_ops import reference
from strata_ops.reference import decode_q8_1, read_exact, read_fp64, read_transformers, tolerance
from support import GEOMETRIES, MODEL, as_bytes, make_inputs, need_transformers


def rounded(value: Fraction) -> float:
    """The nearest float32 of an exact value, even at ties."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = math.frexp(float(magnitude))[1] - 1  # off by one at most, where float() rounds up to a power of two
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    units = round(magnitude / unit)  # Fraction rounds ties to even
    result = units * unit
    return math.copysign(math.inf if result >= 2**128 else float(result), value)


def test_fma_is_rounded_once():
    rng = np.random.default_rng(1)
    anything = rng.integers(0, 2**32, (3, 4000), dtype=np.uint32).view(np.float32)
    # half a unit of c and a little: float64 loses the little and would leave a tie
    little = np.ldexp(np.float32(1), -rng.integers(13, 24, 4000)).astype(np.float32)
    c = rng.integers(2**23, 2**24, 4000).astype(np.float32)
    ties = [(1 + little, 0.5 - little / 2, c), (-1 - little, 0.5 - little / 2, c), (1 + little, 0.5 + little / 2, c)]
    twice = 0
    for a, b, c in [*anything.T, *(row for tie in ties for row in zip(*tie))]:
        if not np.isfinite([a, b, c]).all():
            continue
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        with np.errstate(all="ignore"):
            assert float(reference.fma(a, b, c)) == rounded(exact), (a, b, c)
            twice += float(np.float32(np.float64(a) * np.float64(b) + np.float64(c))) != rounded(exact)
    assert twice, "no case here needs the care that fma takes"


@pytest.mark.parametrize(
    "a, b, c, bits",
    [
        (0.0, -1.0, 0.0, 0x00000000),  # -0 + +0
        (0.0, -1.0, -0.0, 0x80000000),
        (3.0, 2.0, -6.0, 0x00000000),
        (2.0**-100, 2.0**-100, -0.0, 0x00000000),  # far below the smallest subnormal
        (-(2.0**-100), 2.0**-100, 2.0**-149, 0x00000001),
        (2.0**100, 2.0**100, 0.0, 0x7F800000),
        (math.inf, 0.0, 1.0, None),
        (math.inf, 1.0, -math.inf, None),
        (1.0, 1.0, math.inf, 0x7F800000),
    ],
)
def test_fma_at_the_edges(a, b, c, bits):
    with np.errstate(all="ignore"):
        result = reference.fma(np.float32(a), np.float32(b), np.float32(c))
    assert np.isnan(result) if bits is None else int(result.view(np.uint32)) == bits


def test_exp_is_within_one_ulp():
    x = np.unique(np.concatenate([np.linspace(-110, 95, 40001), np.linspace(-1e-3, 1e-3, 2001)]).astype(np.float32))
    with np.errstate(all="ignore"):
        result = reference.exp_exact(x)
        truth = np.exp(x.astype(np.float64))
    finite = truth < float(np.finfo(np.float32).max)
    ulp = np.maximum(np.spacing(truth[finite].astype(np.float32)).astype(np.float64), 2.0**-149)
    assert (np.abs(result[finite].astype(np.float64) - truth[finite]) / ulp).max() <= 1
    assert np.isinf(result[~finite & (truth > 2.0**128)]).all()
    with np.errstate(all="ignore"):
        ends = reference.exp_exact(np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32))
    assert ends[0] == np.inf and ends[1] == 0 and not np.signbit(ends[1]) and np.isnan(ends[2])
    assert ends[3] == ends[4] == 1


@pytest.mark.parametrize("geometry", [MODEL, *GEOMETRIES], ids=str)
@pytest.mark.parametrize("fold, inject, q8_1", [(True, True, True), (False, False, False)])
def test_contract_is_as_near_the_truth_as_eager(geometry, fold, inject, q8_1):
    inputs = make_inputs(geometry, 2, seed=7).ask(fold=fold, inject=inject)
    exact, truth = read_exact(*inputs, q8_1=q8_1), read_fp64(*inputs, q8_1=q8_1)
    for name, bound in tolerance(*inputs).items():
        assert (getattr(exact, name).double() - getattr(truth, name)).abs().max() <= bound, name
    assert (exact.inject is None, exact.residual_out is None, exact.q8_1 is None) == (not inject, not fold, not q8_1)
    if q8_1:
        image, bound = decode_q8_1(exact.q8_1), tolerance(*inputs)["mixed"]
        half = 2.0**-11  # relative error of a half
        step = truth.q8_1.d.repeat_interleave(32, -1)
        assert ((image.values() - truth.mixed).abs() <= step * (0.5 + 127 * half) + 2 * bound).all()
        assert ((image.s - truth.q8_1.s).abs() <= truth.q8_1.s.abs() * half + 32 * bound).all()


def transformers_module(geometry, inputs, eps):
    """The model's own module with these weights. (It wants at least two streams.)"""
    Qwen4ExpTextConfig, Qwen4ExpTextGatedResidual = need_transformers()
    width, streams, rank = geometry
    config = Qwen4ExpTextConfig(hidden_size=width, hc_count=streams, hc_lowrank=rank, rms_norm_eps=eps)
    module = Qwen4ExpTextGatedResidual(config, use_combine=inputs.w_inject is not None).bfloat16()
    with torch.no_grad():
        module.hc_norm.weight.copy_((inputs.w_norm - 1).flatten())
        module.input_mix_weight_down.weight.copy_(inputs.w_down)
        module.input_mix_weight_up.weight.copy_(inputs.w_up)
        if inputs.w_inject is not None:
            module.block_inject_weight.weight.copy_(inputs.w_inject)
    gain = 1 + module.hc_norm.weight.detach().float().view(streams, width)
    return module, inputs._replace(w_norm=gain)


@pytest.mark.parametrize("geometry", [MODEL, (2048, 4, 320), (96, 3, 24)], ids=str)
@pytest.mark.parametrize("inject", [False, True])
@torch.no_grad()
def test_transformers_order_is_the_installed_module(geometry, inject):
    """Bit for bit, the write of the layer before it included."""
    eps = 1e-5
    module, inputs = transformers_module(geometry, make_inputs(geometry, 5, seed=3).ask(inject=inject), eps)
    stream = inputs.residual.bfloat16()
    # as Qwen4ExpTextDecoderLayer writes a block's output; the weights are a module's output for the logits inject_prev
    weights = 2 * torch.sigmoid(inputs.inject_prev.bfloat16() / geometry[1])
    stream = stream.flatten(-2) + (inputs.block_out.bfloat16().unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)
    theirs = module(stream)
    mixed, _, activated = theirs if inject else (theirs, None, None)
    ours = read_transformers(*inputs, eps=eps)
    assert torch.equal(as_bytes(ours.mixed), as_bytes(mixed))
    assert torch.equal(as_bytes(ours.residual_out.flatten(-2)), as_bytes(stream))
    assert ours.inject is None if not inject else torch.equal(as_bytes(ours.inject), as_bytes(activated))


@torch.no_grad()
def test_contract_is_nearer_the_truth_than_transformers():
    """The tolerance against Transformers is the whole of its own bf16 error: the op adds nothing to it."""
    inputs = make_inputs(MODEL, 4, seed=5)
    inputs = inputs.map(lambda t: t.bfloat16().to(t.dtype))  # so that rounding the stream is not counted
    theirs, truth, exact = read_transformers(*inputs), read_fp64(*inputs), read_exact(*inputs)
    for name in ("mixed", "lo", "residual_out"):
        of_theirs = (getattr(theirs, name).double() - getattr(truth, name)).abs().max()
        of_ours = (getattr(exact, name).double() - getattr(theirs, name).double()).abs().max()
        assert of_ours <= of_theirs + tolerance(*inputs)[name], name
        assert of_theirs > 100 * (getattr(exact, name).double() - getattr(truth, name)).abs().max(), name
    activated = 2 * torch.sigmoid(truth.inject / MODEL[1])
    assert (theirs.inject.double() - activated).abs().max() < 2.0**-7


@pytest.mark.parametrize("value", [0.0, 1.0, 65504.0, 65519.0, 65520.0, 1e6, 2.0**-24, 2.0**-25, 3 * 2.0**-26, 1e-45])
def test_half_of_the_witness(value):
    expected = min(value, 65504.0)
    expected = float(np.float16(expected))
    for sign in (1, -1):
        bits = int(reference.half_exact(np.float32(sign * value)))
        assert np.uint16(bits).view(np.float16) == sign * expected and (bits >> 15) == (sign < 0)
    assert int(reference.half_exact(np.float32(np.nan))) == 0x7E00
