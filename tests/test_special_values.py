"""NaN, infinities, zeros, subnormals, overflow, and q8_1 at half's limits: always the contract's bytes."""

import functools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from strata_ops.reference import read_exact
from support import MODEL, SMALL, Inputs, as_bytes, assert_same, make_inputs, runners

NAN_BITS = 0x7FC00000
SPECIAL = [
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 3.4028235e38, 2e19, 2.0**-149, 1e-40, -104.0),
    *(1.0, -1.0, -3.4028235e38, 1e-19, 2.0**-126, -(2.0**-149), 88.8, -88.8, 104.0, 1e6),
]


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def assert_one_nan(result):
    """Every NaN that is stored is the one."""
    for name in ("mixed", "inject", "residual_out", "lo", "rs"):
        value = getattr(result, name)
        if value is not None:
            one = NAN_BITS >> 16 if value.dtype == torch.bfloat16 else NAN_BITS
            assert (bits(value)[value.cpu().isnan()] == one).all(), name


# Which part of otherwise ordinary inputs takes a value.
PLACES = {
    "one value": lambda i: [i.residual[0, 0, 5:6]],
    "a stream": lambda i: [i.residual[1, 1]],
    "a token": lambda i: [i.residual[0]],
    "block_out": lambda i: [i.block_out[1, 7:40]],
    "inject_prev": lambda i: [i.inject_prev[0, 1:]],
    "w_norm": lambda i: [i.w_norm[1, 3:4]],
    "w_down": lambda i: [i.w_down[2, 17:18]],
    "w_up": lambda i: [i.w_up[33, 4:5]],
    "w_inject": lambda i: [i.w_inject[1, 9:10]],
    "all weights": lambda i: [i.w_norm, i.w_down, i.w_up, i.w_inject],
    "everything": lambda i: i,
}


@functools.cache
def special(geometry, place, value, bf16=False):
    """Such inputs and their result; at the model's geometry mostly the portable path's, which is quicker."""
    inputs = make_inputs(geometry, 2, seed=4)
    inputs = inputs.bf16_streams() if bf16 else inputs
    for part in PLACES[place](inputs):
        part.copy_(torch.tensor(value))  # a bf16 takes the nearest that it has
    witness = read_exact if geometry == SMALL or value in SPECIAL[:2] else runners()[0]
    return inputs, witness(*inputs, q8_1=True) if witness is read_exact else witness(inputs, q8_1=True)


@pytest.mark.parametrize("geometry", [MODEL, SMALL], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_special_values(device_variants, geometry, place):
    if not device_variants.takes(geometry):
        pytest.skip("compiled for the model's geometry")
    for value in SPECIAL if geometry == SMALL else SPECIAL[:10]:
        inputs, expected = special(geometry, place, value)
        result = device_variants(inputs, q8_1=True)
        assert_same(result, expected, f"{value}")
        assert_one_nan(result)


@pytest.mark.parametrize("place", ["one value", "a stream", "a token", "block_out", "inject_prev"])
def test_special_values_of_bf16_streams(device_variants, place):
    geometry = SMALL if device_variants.takes(SMALL) else MODEL
    for value in SPECIAL if geometry == SMALL else SPECIAL[:10]:
        inputs, expected = special(geometry, place, value, True)
        result = device_variants(inputs, q8_1=True)
        assert_same(result, expected, f"{value}")
        assert_one_nan(result)


# block_out and residual (bits of bf16), what R' is rounded to; the gain of the write is 1.
BF16_FOLDS = [
    (0x3B80, 0x3F80, 0x3F80),  # 2^-8 + 1: a tie, down to even
    (0x3B80, 0x3F81, 0x3F82),  # a tie, up to even
    (0xBB80, 0xBF81, 0xBF82),
    (0x3B81, 0x3F80, 0x3F81),  # just above a tie
    (0x3B00, 0x3F81, 0x3F81),  # below one
    (0x7B00, 0x7F7F, 0x7F80),  # half a step beyond the largest: infinite, the fp32 is not
    (0xFB00, 0xFF7F, 0xFF80),
    (0x7A00, 0x7F7F, 0x7F7F),
    (0x7F7F, 0x7F7F, 0x7F80),  # the fp32 overflows
    (0x8000, 0x8000, 0x8000),  # -0
    (0x8000, 0x0000, 0x0000),
    (0x3F80, 0xBF80, 0x0000),  # 1 - 1
    (0x0001, 0x0001, 0x0002),  # subnormals
    (0x0001, 0x007F, 0x0080),
    (0x8001, 0x0000, 0x8001),
    (0x7F80, 0xFF80, 0x7FC0),  # inf - inf
    (0xFF80, 0x3F80, 0xFF80),
    (0x3F80, 0x7F81, 0x7FC0),  # any NaN of bf16 becomes the one
    (0xFFFF, 0x0000, 0x7FC0),
    (0x0000, 0xFFC1, 0x7FC0),
]


def test_bf16_streams_are_rounded_to_the_nearest_even(device_variants):
    geometry = SMALL if device_variants.takes(SMALL) else MODEL
    inputs = make_inputs(geometry, 3, seed=8).bf16_streams()
    inputs.inject_prev.zero_()  # sigmoid(0) = 1/2
    before, block_out, expected = torch.tensor(BF16_FOLDS, dtype=torch.int32).to(torch.int16)[:, [1, 0, 2]].T
    inputs.residual.view(torch.int16)[1, :, : len(before)] = before
    inputs.block_out.view(torch.int16)[1, : len(before)] = block_out
    result = device_variants(inputs, q8_1=True)
    for stored in bits(result.residual_out)[1, :, : len(before)]:
        assert [hex(b % 2**16) for b in stored.tolist()] == [hex(b % 2**16) for b in expected.tolist()]
    assert_same(result, read_exact(*inputs, q8_1=True))


@pytest.mark.parametrize("payload", [0x7F800001, 0x7FFFFFFF, -1, -0x00400000, 0x7FC00001])
def test_every_nan_is_stored_as_one(device_variants, payload):
    """Whatever NaN comes in, quiet or signalling, of either sign."""
    inputs = make_inputs(MODEL, 2, seed=5)
    nan = torch.tensor(payload, dtype=torch.int32)
    inputs.residual.view(torch.int32)[0, 2] = nan
    inputs.block_out.view(torch.int32)[1, 100:200] = nan
    result = device_variants(inputs, q8_1=True)
    assert_same(result, read_exact(*inputs, q8_1=True))
    assert_one_nan(result)
    assert bits(result.residual_out)[0, 2].eq(NAN_BITS).all() and bits(result.mixed)[0].eq(NAN_BITS).all()


@pytest.mark.parametrize("bf16", [False, True])
def test_in_place_without_a_write_touches_nothing(device, bf16):
    """NaNs of any bits stay as they are."""
    inputs = make_inputs(SMALL, 3, bits=True).ask(fold=False).map(lambda t: t.to(device))
    inputs = inputs.bf16_streams() if bf16 else inputs
    assert inputs.residual.isnan().any()
    before = as_bytes(inputs.residual)
    torch.ops.strata.fused_gr_read_(*inputs)
    assert torch.equal(as_bytes(inputs.residual), before)


def test_overflowing_squares_read_as_zero(device_variants):
    inputs = make_inputs(MODEL, 2, seed=6).ask(fold=False)
    inputs.residual[0, 1] = 3e19  # squares to 9e38
    inputs.w_norm[1] = inputs.w_norm[1].abs()
    result = device_variants(inputs)
    assert bits(result.rs)[0, 1] == 0 and result.rs[1].gt(0).all()
    without = inputs._replace(residual=inputs.residual.clone())
    without.residual[0, 1] = 0
    assert_same(result._replace(rs=None), read_exact(*without)._replace(rs=None))


def crafted(**changes):
    """One stream of 32 ones, eps to be 0: rs = 1 and xn = w_norm. Rank 8; weights 0 unless given, so gates are 1/2."""
    zeros = torch.zeros(8, 32, dtype=torch.bfloat16)
    return Inputs(torch.ones(1, 1, 32), torch.ones(1, 32), zeros, zeros.T.contiguous())._replace(**changes)


def small_runners():
    return [r for r in runners() if r.takes((32, 1, 8))]


@pytest.mark.parametrize("runner", small_runners(), ids=str)
@pytest.mark.parametrize(
    "logit, lo, gate",
    [
        (math.inf, 0x7F800000, 0x3F800000),
        (-math.inf, NAN_BITS, NAN_BITS),  # -inf / (1 + inf)
        (-89.0, 0x80000000, 0x3F000000),  # exp overflows: -89 / inf
        (-200.0, 0x80000000, 0x3F000000),
        (0.0, 0x00000000, 0x3F000000),
        (200.0, 0x43480000, 0x3F800000),
    ],
)
def test_limits_of_silu_and_sigmoid(runner, logit, lo, gate):
    """xn = 1 in element 0 only, so that each down sum is w_down's `logit`; up rows are 1."""
    one = torch.zeros(1, 32)
    one[0, 0] = 1
    down = torch.zeros(8, 32, dtype=torch.bfloat16)
    down[:, 0] = logit
    result = runner(crafted(w_norm=one, w_down=down, w_up=torch.ones(32, 8, dtype=torch.bfloat16)), eps=0.0)
    assert bits(result.rs).item() == 0x3F800000
    assert bits(result.lo)[0].tolist() == [lo if lo < 2**31 else lo - 2**32] * 8
    assert bits(result.mixed)[0, 0].item() == gate


# ----------------------------------------------------------------------------------------------------------------------
# q8_1


def values_as_mixed(values):
    """Inputs whose `mixed` is exactly these 32 values."""
    values = np.asarray(values, np.float32)
    if not np.isinf(values).any():
        # gates of 1/2, so w_norm is twice the value; a NaN comes by its own gate, for 0 * NaN would be in each dot
        gain = np.where(np.isnan(values), np.float32(1), values * np.float32(2))
        up = np.zeros((32, 8), np.float32)
        up[np.isnan(values)] = np.nan
        down = np.zeros((8, 32), np.float32)
    else:
        # down rows that have the values' signs: each dot is +inf, lo too, and gates are 1 where up rows are
        gain = np.where(np.isnan(values), np.float32(1), values)
        up = np.where(np.isnan(values), np.float32(np.nan), np.float32(1))[:, None].repeat(8, 1)
        down = np.where(gain == 0, np.float32(1), np.sign(gain))[None].repeat(8, 0)
    as_bf16 = [torch.from_numpy(np.ascontiguousarray(w, np.float32)).bfloat16() for w in (down, up)]
    return crafted(w_norm=torch.from_numpy(gain)[None].contiguous(), w_down=as_bf16[0], w_up=as_bf16[1])


def block(*values):
    return [*values, *([0.0] * (32 - len(values)))]


HALF = {"nan": 0x7E00, "max": 0x7BFF, "-max": 0xFBFF}
# mixed -> d, s (bits of half), q
Q8_CASES = {
    "ones": (block(*[127.0] * 32), 0x3C00, 0x6BF0, [127] * 32),
    "halves go away from zero": (block(127.0, 0.5, -0.5, 1.5, -2.5), 0x3C00, 0x57E0, block(127, 1, -1, 2, -3)),
    "below a half": (block(127.0, 0.49999997), 0x3C00, 0x57F8, block(127, 0)),
    "zero": (block(), 0, 0, block()),
    "-0": ([-0.0] * 32, 0, 0x8000, block()),
    "-0 and one 0": ([-0.0] * 31 + [0.0], 0, 0, block()),
    "d = 65504": (block(65504.0 * 127), HALF["max"], HALF["max"], block(127)),
    "s = 65504": (block(65504.0), 0x6008, 0x7BFF, block(127)),
    "s = 65519": (block(65519.0), 0x6008, 0x7BFF, block(127)),
    "s = 65520": (block(65520.0), 0x6008, 0x7BFF, block(127)),
    "s = -65520": (block(-65520.0), 0x6008, 0xFBFF, block(-127)),
    "s = 1e6": (block(1e6), 0x6FB1, HALF["max"], block(127)),
    "s = -1e6": (block(-1e6), 0x6FB1, HALF["-max"], block(-127)),
    "s at a tie, down": (block(2049.0), 0x4C09, 0x6800, block(127)),
    "s at a tie, up": (block(-2051.0), 0x4C0A, 0xE802, block(-127)),
    "d beyond half": (block(1e7, -1e7), HALF["max"], 0, block(127, -127)),
    "d subnormal": (block(2.0**-20 * 127), 0x0010, 0x07F0, block(127)),
    "d below half's least": (block(2.0**-26 * 127, -(2.0**-26) * 64), 0, 0x0010, block(127, -64)),
    "d at a tie of half's least": (block(2.0**-25 * 127), 0, 0x0040, block(127)),
    "d rounds to one unit": (block(190 * 2.0**-149, 5 * 2.0**-149), 0, 0, block(127, 5)),
    "d rounds to zero": (block(63 * 2.0**-149), 0, 0, block()),
    "NaN": (block(math.nan, 1.0), HALF["nan"], HALF["nan"], block()),
    "NaN and inf": (block(math.inf, math.nan, 1.0), HALF["nan"], HALF["nan"], block()),
    "inf": (block(math.inf, 1.0), HALF["max"], HALF["max"], block()),
    "-inf": (block(-math.inf, 1.0), HALF["max"], HALF["-max"], block()),
    "inf - inf": (block(math.inf, -math.inf), HALF["max"], HALF["nan"], block()),
    "finite sum overflows": ([1.5e38] * 32, HALF["max"], HALF["max"], [127] * 32),
    # the tree's first stage: lanes 0 and 16 go to +inf, 1 and 17 to -inf
    "finite sum is NaN": (
        [1.5e38 if i in (0, 16, 8, 24) else -1.5e38 if i in (1, 17, 9, 25) else 0.0 for i in range(32)],
        *(HALF["max"], HALF["nan"]),
        [127 if i in (0, 16, 8, 24) else -127 if i in (1, 17, 9, 25) else 0 for i in range(32)],
    ),
}


@pytest.mark.parametrize("runner", small_runners(), ids=str)
@pytest.mark.parametrize("name", Q8_CASES)
def test_q8_1(runner, name):
    values, d, s, q = Q8_CASES[name]
    inputs = values_as_mixed(values)
    result = runner(inputs, eps=0.0, q8_1=True)
    mixed = np.asarray(values, np.float32)
    mixed[np.isnan(mixed)] = np.uint32(NAN_BITS).view(np.float32)
    assert bits(result.mixed)[0].tolist() == mixed.view(np.int32).tolist(), "the test's own inputs"
    image = result.q8_1.cpu().numpy()[0, 0]
    assert [hex(h) for h in image[:4].view("<u2")] == [hex(d), hex(s)]
    assert image[4:].view(np.int8).tolist() == [int(v) for v in q]
    assert_same(result, read_exact(*inputs, eps=0.0, q8_1=True))


# ----------------------------------------------------------------------------------------------------------------------
# Anything


@st.composite
def reads(draw):
    """Small reads of ordinary values, of any bits at all, or of ordinary ones with special values strewn in."""
    geometry = (32 * draw(st.integers(1, 6)), draw(st.integers(1, 8)), 8 * draw(st.integers(1, 7)))
    tokens = draw(st.integers(0, 4))
    kind = draw(st.sampled_from(["ordinary", "bits", "strewn"]))
    inputs = make_inputs(geometry, tokens, draw(st.integers(0, 2**31)), bits=kind == "bits")
    if kind == "strewn":
        for t in inputs:
            for _ in range(draw(st.integers(0, 2)) if t.numel() else 0):
                t.view(-1)[draw(st.integers(0, t.numel() - 1))].copy_(torch.tensor(draw(st.sampled_from(SPECIAL))))
    scale = draw(st.sampled_from([1.0, 1e-30, 1e-38, 1e15]))
    inputs.residual.mul_(scale)
    inputs = inputs.bf16_streams() if draw(st.booleans()) else inputs
    inputs = inputs.ask(fold=draw(st.booleans()), inject=draw(st.booleans()))
    return inputs, dict(eps=draw(st.sampled_from([1e-6, 0.0, 1e-12, 1.0])), q8_1=draw(st.booleans()))


@settings(max_examples=150)
@given(reads())
def test_anything_gives_the_contract(read):
    inputs, options = read
    exact = read_exact(*inputs, **options)
    width, streams = inputs.residual.shape[-1], inputs.residual.shape[-2]
    for runner in runners():
        if runner.takes((width, streams, inputs.w_down.shape[0])):
            result = runner(inputs, **options)
            assert_same(result, exact, str(runner))
            assert_one_nan(result)


@settings(max_examples=60)
@given(reads(), st.data())
def test_a_token_is_alone(read, data):
    """Each token's bits are those that it has by itself."""
    inputs, options = read
    if not len(inputs.residual):
        return
    token = data.draw(st.integers(0, len(inputs.residual) - 1))
    for runner in runners():
        if runner.takes((inputs.residual.shape[-1], inputs.residual.shape[-2], inputs.w_down.shape[0])):
            together, alone = runner(inputs, **options), runner(inputs.tokens(slice(token, token + 1)), **options)
            for all_of_them, one in zip(together, alone):
                assert one is None or torch.equal(as_bytes(all_of_them[token]), as_bytes(one[0]))
