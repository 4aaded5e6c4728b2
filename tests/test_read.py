"""One answer: every code path of every device gives the contract's bytes, whatever stands beside a token."""

import itertools
import math

import pytest
import torch

import strata_ops
from strata_ops.reference import decode_q8_1, read_exact, read_fp64, tolerance
from support import (
    GEOMETRIES,
    MODEL,
    OPTIONS,
    SMALL,
    TOKENS,
    Inputs,
    as_bytes,
    assert_same,
    case,
    cut,
    make_inputs,
    named,
)

op = torch.ops.strata


@pytest.mark.parametrize("fold, inject, q8_1", OPTIONS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_model_geometry(device_variants, tokens, fold, inject, q8_1):
    if device_variants.q8_columns == 32 and not q8_1:
        pytest.skip("the 32-column kernel is for q8_1 alone")
    inputs, exact = case(MODEL, fold)
    head = slice(tokens)
    result = device_variants(inputs.tokens(head).ask(fold=fold, inject=inject), q8_1=q8_1)
    assert_same(result, cut(exact, head, inject=inject, q8_1=q8_1))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_other_geometries(device_variants, geometry):
    if not device_variants.takes(geometry):
        pytest.skip("compiled for the model's geometry")
    for fold in (True, False):
        inputs, exact = case(geometry, fold)
        for tokens, inject, q8_1 in itertools.product((0, 1, 3, 9), (False, True), (False, True)):
            result = device_variants(inputs.tokens(slice(tokens)).ask(fold=fold, inject=inject), q8_1=q8_1)
            what = f"T={tokens} fold={fold} inject={inject} q8_1={q8_1}"
            assert_same(result, cut(exact, slice(tokens), inject=inject, q8_1=q8_1), what)


@pytest.mark.parametrize("geometry", [MODEL, *GEOMETRIES[:4]], ids=str)
def test_bf16_streams(device_variants, geometry):
    if not device_variants.takes(geometry):
        pytest.skip("compiled for the model's geometry")
    for fold in (True, False):
        inputs, exact = case(geometry, fold, True)
        for tokens, q8_1 in itertools.product((0, 1, 3, 8, 9) if geometry == MODEL else (1, 9), (False, True)):
            result = device_variants(inputs.tokens(slice(tokens)), q8_1=q8_1)
            what = f"T={tokens} fold={fold} q8_1={q8_1}"
            assert_same(result, cut(exact, slice(tokens), q8_1=q8_1), what)


@pytest.mark.parametrize("geometry", [MODEL, SMALL], ids=str)
def test_bf16_streams_are_read_as_what_is_stored(device_variants, geometry):
    """One rounding: the rest of the read is that of fp32 streams which hold the values stored."""
    if not device_variants.takes(geometry):
        pytest.skip("compiled for the model's geometry")
    inputs = make_inputs(geometry, 9, seed=21).bf16_streams()
    read = device_variants(inputs, q8_1=True)
    again = device_variants(inputs.ask(fold=False)._replace(residual=read.residual_out.float().cpu()), q8_1=True)
    assert_same(read._replace(residual_out=None), again)
    wide = device_variants(inputs._replace(residual=inputs.residual.float(), block_out=inputs.block_out.float()))
    assert torch.equal(as_bytes(read.residual_out), as_bytes(wide.residual_out.bfloat16()))
    assert not torch.equal(read.residual_out.float(), wide.residual_out)


@pytest.mark.parametrize("geometry", [MODEL, *GEOMETRIES], ids=str)
@pytest.mark.parametrize("fold", [False, True])
def test_within_the_tolerance_of_fp64(device_variants, geometry, fold):
    """By way of no other code of this project than the oracle."""
    if not device_variants.takes(geometry):
        pytest.skip("compiled for the model's geometry")
    inputs = make_inputs(geometry, 8, seed=11).ask(fold=fold)
    result, truth, bounds = device_variants(inputs, q8_1=True), read_fp64(*inputs), tolerance(*inputs)
    assert set(bounds) == {"mixed", "inject", "lo", "rs"} | ({"residual_out"} if fold else set())
    for name, bound in bounds.items():
        assert (getattr(result, name).cpu().double() - getattr(truth, name)).abs().max() <= bound, name
    image = decode_q8_1(result.q8_1)
    step = image.d.repeat_interleave(32, -1)  # of the values; a half is off by 2^-11 of itself at most
    assert ((image.values() - truth.mixed).abs() <= step * (0.5 + 128 * 2.0**-11) + bounds["mixed"]).all()
    block_sum = truth.mixed.unflatten(-1, (-1, 32)).sum(-1)
    assert ((image.s - block_sum).abs() <= image.s.abs() * 2.0**-11 + 32 * bounds["mixed"]).all()


POISON = [math.nan, math.inf, -math.inf, 3e38, 1e-45]


@pytest.mark.parametrize("value", POISON)
def test_neighbours_do_not_matter(device_variants, value):
    """Tokens 0, 3 and 7 of 8 (and 16 of 17) keep their bits beside tokens full of `value`."""
    for fold, tokens in ((True, 8), (False, 8), (True, 17)):
        inputs, exact = case(MODEL, fold)
        inputs = inputs.tokens(slice(tokens)).map(torch.clone)
        kept = [0, 3, 7] if tokens == 8 else [16]
        poisoned = [t for t in range(tokens) if t not in kept]
        for activation in (inputs.residual, inputs.block_out, inputs.inject_prev):
            if activation is not None:
                activation[poisoned] = value
        assert_same(cut(device_variants(inputs, q8_1=True), kept), cut(exact, kept), f"fold={fold} T={tokens}")


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9])
def test_position_does_not_matter(device_variants, tokens):
    inputs, exact = case()
    for first in (0, 1, 7, 17 - tokens):
        part = slice(first, first + tokens)
        assert_same(device_variants(inputs.tokens(part), q8_1=True), cut(exact, part), f"from token {first}")
    backwards = torch.arange(16, 16 - tokens, -1)
    assert_same(device_variants(inputs.tokens(backwards), q8_1=True), cut(exact, backwards), "backwards")


def test_the_same_again(device_variants):
    inputs, exact = case()
    for _ in range(10):
        assert_same(device_variants(inputs.tokens(slice(4)), q8_1=True), cut(exact, slice(4)))


# ----------------------------------------------------------------------------------------------------------------------
# The forms of the op


def buffers(result, inputs, device):
    """Buffers for .out, in the shapes of a whole result; empty ones where nothing was asked for."""
    lead = inputs.residual.shape[:-2]
    streams, width = inputs.residual.shape[-2:]
    dtypes = {"q8_1": torch.uint8, "residual_out": inputs.residual.dtype}
    empty = {"inject": (*lead, 0), "residual_out": (*lead, streams, 0), "q8_1": (*lead, width // 32, 0)}
    made = {}
    for name, value in result._asdict().items():
        dtype = dtypes.get(name, torch.float32)
        shape = empty[name] if value is None else value.shape
        made["q8_1_out" if name == "q8_1" else name] = torch.full(shape, 77, dtype=dtype, device=device)
    return made


@pytest.mark.parametrize("geometry, bf16", [(MODEL, False), (SMALL, False), (SMALL, True)], ids=str)
@pytest.mark.parametrize("fold, inject, q8_1", OPTIONS)
@pytest.mark.parametrize("tokens", [0, 1, 4, 9])
def test_forms_agree(device, geometry, bf16, tokens, fold, inject, q8_1):
    inputs, exact = case(geometry, fold, bf16)
    expected = cut(exact, slice(tokens), inject=inject, q8_1=q8_1)
    inputs = inputs.tokens(slice(tokens)).ask(inject=inject).map(lambda t: t.clone().to(device))
    before = [None if t is None else as_bytes(t) for t in inputs]

    raw = op.fused_gr_read(*inputs, q8_1=q8_1)
    assert_same(named(raw), expected, "functional")
    streams, width = inputs.residual.shape[-2:]
    shapes = [(width,), (streams * inject,), (streams, width * fold), (geometry[2],), (streams,)]
    assert [tuple(t.shape) for t in raw] == [(tokens, *s) for s in [*shapes, (width // 32, 36 * q8_1)]]
    public = strata_ops.fused_gr_read(*inputs, q8_1=q8_1)
    assert type(public).__name__ == "FusedGrRead" and public._fields == exact._fields
    assert_same(public, expected, "Python")

    out = buffers(expected, inputs, device)
    assert op.fused_gr_read.out(*inputs, q8_1=q8_1, **out) is None
    assert_same(named(out.values()), expected, "out")
    reused = public._make(None if t is None else torch.full_like(t, 77) for t in public)
    assert strata_ops.fused_gr_read_out(*inputs, q8_1=q8_1, out=reused) is reused
    assert_same(reused, expected, "Python, out")

    assert all(b is None or torch.equal(as_bytes(t), b) for t, b in zip(inputs, before)), "an input changed"
    everything = [t for t in [*raw, *out.values(), *inputs] if t is not None and t.numel()]
    places = [t.untyped_storage().data_ptr() for t in everything]
    assert len(set(places)) == len(places), "an output shares memory"

    for in_place in (op.fused_gr_read_, strata_ops.fused_gr_read_):
        written = inputs._replace(residual=inputs.residual.clone())
        result = in_place(*written, q8_1=q8_1)
        result = named(result) if in_place is op.fused_gr_read_ else result
        assert result.residual_out is None
        result = result._replace(residual_out=written.residual if fold else None)
        assert_same(result, expected, f"in place, {in_place}")
        assert fold or torch.equal(as_bytes(written.residual), before[0]), "no pending write, yet the stream changed"
        assert all(b is None or torch.equal(as_bytes(t), b) for t, b in list(zip(written, before))[1:])


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (1, 1, 4), (3, 0), (2, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("geometry, bf16", [(MODEL, False), (SMALL, False), (SMALL, True)], ids=str)
def test_leading_dimensions(device, geometry, bf16, lead):
    inputs, exact = case(geometry, bf16=bf16)
    count = math.prod(lead)

    def shaped(t):
        return t[:count].reshape(*lead, *t.shape[1:])

    inputs = inputs._replace(
        residual=shaped(inputs.residual), block_out=shaped(inputs.block_out), inject_prev=shaped(inputs.inject_prev)
    ).map(lambda t: t.clone().to(device))
    expected = exact._make(shaped(t) for t in exact)
    assert_same(named(op.fused_gr_read(*inputs, q8_1=True)), expected)
    out = buffers(expected, inputs, device)
    op.fused_gr_read.out(*inputs, q8_1=True, **out)
    assert_same(named(out.values()), expected, "out")
    assert_same(named(op.fused_gr_read_(*inputs, q8_1=True), inputs.residual), expected, "in place")


def strided(t):
    """The same values, every second element of a row."""
    return torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2]


def misaligned(t):
    """The same values, contiguous, from 4 bytes after a boundary."""
    return torch.cat([t.new_full((1,), math.nan), t.flatten()])[1:].view(t.shape)


def transposed(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def expanded(t):
    return t[:1].expand_as(t)


@pytest.mark.parametrize("geometry, bf16", [(MODEL, False), (SMALL, False), (SMALL, True)], ids=str)
@pytest.mark.parametrize("change", [strided, misaligned, transposed, expanded])
@pytest.mark.parametrize("name", ["residual", "block_out", "inject_prev"])
def test_activations_of_any_layout(device, geometry, bf16, change, name):
    inputs, exact = case(geometry, bf16=bf16)
    inputs = inputs.tokens(slice(5)).map(lambda t: t.to(device))
    exact = cut(exact, slice(5))
    changed = inputs._replace(**{name: change(getattr(inputs, name))})
    if change is expanded:
        exact = read_exact(*changed, q8_1=True)
    assert not changed.residual.is_contiguous() or change is misaligned or name != "residual"
    before = [as_bytes(t) for t in changed]
    assert_same(named(op.fused_gr_read(*changed, q8_1=True)), exact)
    if name != "residual":
        written = changed._replace(residual=changed.residual.clone())
        assert_same(named(op.fused_gr_read_(*written, q8_1=True), written.residual), exact, "in place")
    out = buffers(exact, changed, device)
    op.fused_gr_read.out(*changed, q8_1=True, **out)
    assert_same(named(out.values()), exact, "out")
    assert all(torch.equal(as_bytes(t), b) for t, b in zip(changed, before))


def test_eps_is_rounded_once(device):
    inputs = make_inputs(SMALL, 2, seed=2)
    inputs.residual.mul_(1e-3)
    for eps in (0.0, -0.0, 1e-6, 1e-5, 1e-46, 0.1, 1e39, math.inf):
        exact = read_exact(*inputs, eps=eps, q8_1=True)
        moved = inputs.map(lambda t: t.to(device))
        assert_same(named(op.fused_gr_read(*moved, eps=eps, q8_1=True)), exact, f"eps={eps}")
        assert_same(strata_ops.fused_gr_read(*moved, eps=eps, q8_1=True), exact, f"eps={eps}")


# ----------------------------------------------------------------------------------------------------------------------
# The CPU's threads and floating-point mode


@pytest.mark.parametrize("geometry", [MODEL, SMALL], ids=str)
def test_threads_do_not_matter(device_variants, geometry):
    if device_variants.device != "cpu":
        pytest.skip("the CPU's")
    inputs, exact = case(geometry)
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        for tokens in (1, 2, 8, 17):
            result = device_variants(inputs.tokens(slice(tokens)), q8_1=True)
            assert_same(result, cut(exact, slice(tokens)), f"{threads} threads, T={tokens}")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("geometry", [MODEL, SMALL], ids=str)
def test_flush_denormal_does_not_matter(device_variants, geometry, threads):
    """Subnormal activations and weights, in a process that flushes them; and it goes on flushing them."""
    if device_variants.device != "cpu":
        pytest.skip("the CPU's")
    inputs, _ = case(geometry)
    inputs = inputs.tokens(slice(2)).map(torch.clone)
    inputs.residual.mul_(1e-39)
    inputs.block_out.mul_(1e-39)
    inputs.w_norm.mul_(1e-3)
    exact = read_exact(*inputs, eps=0.0, q8_1=True)
    small = torch.tensor([1e-39])
    assert inputs.residual.abs().max() < 2.0**-126 and exact.residual_out.abs().max() < 2.0**-126
    torch.set_num_threads(threads)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        flushed = as_bytes(small * 1)
        result = device_variants(inputs, eps=0.0, q8_1=True)
        again = as_bytes(small * 1)
    finally:
        torch.set_flush_denormal(False)
    assert_same(result, exact)
    assert not flushed.any() and torch.equal(flushed, again), "the mode was not restored"
    assert Inputs(*inputs).residual.abs().max() > 0
