"""What the op refuses: in one line that names the argument, before anything is written, and in the fake kernels' words
too."""

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import strata_ops
from strata_ops.reference import Read
from support import MODEL, SMALL, Inputs, as_bytes, assert_same, case, make_inputs, named
from test_read import buffers, misaligned, strided

op = torch.ops.strata
WEIGHTS = ("w_norm", "w_down", "w_up", "w_inject")
ACTIVATIONS = ("residual", "block_out", "inject_prev")
OUTPUTS = ("mixed", "inject", "residual_out", "lo", "rs", "q8_1_out")


def other_dtype(t):
    return t.to(torch.float16 if t.dtype != torch.float16 else torch.float32)


def other_float(t):
    return t.to(torch.float32 if t.dtype == torch.bfloat16 else torch.bfloat16)


def double(t):
    return t.double()


def one_more(dimension):
    def longer(t):
        return torch.cat([t, t.narrow(dimension, 0, 1)], dimension)

    longer.__name__ = f"one_more_at_{dimension}"
    return longer


def one_less(t):
    return t[..., :-1].contiguous()


def nothing(t):
    return t[..., :0]


def unsqueezed(t):
    return t.unsqueeze(0)


def flat(t):
    return t.flatten()


def scalar(t):
    return t.flatten()[0]


def on_meta(t):
    return t.to("meta")


def transposed(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def at(raw, t):
    """A tensor like `t` at the start of these bytes."""
    return raw[: t.nbytes].view(t.dtype).view(t.shape)


def in_bytes(t, offset=8):
    """The same values, `offset` bytes after a 16-byte boundary."""
    raw = torch.empty(t.nbytes + 32, dtype=torch.uint8, device=t.device)
    return at(raw[-raw.data_ptr() % 16 + offset :], t).copy_(t)


SHAPES = [one_more(0), one_more(-1), one_less, nothing, unsqueezed, flat, scalar]
DTYPES = [other_dtype, other_float, double]
MEMORY = [strided, transposed, misaligned, in_bytes]
EVERY = [
    *itertools.product([*ACTIVATIONS, *WEIGHTS], [*DTYPES, *SHAPES, on_meta]),
    *itertools.product(WEIGHTS, MEMORY),
]
# A residual of other sizes is a different read: what does not fit it is then named.
NAMED_INSTEAD = {
    ("residual", "one_more_at_0"): "block_out",
    ("residual", "unsqueezed"): "block_out",
    ("residual", "other_float"): "block_out",  # streams of bf16 are welcome, with block_out of bf16
    ("residual", "on_meta"): "w_norm",
    ("w_down", "one_more_at_0"): "w_down",
}


def refusal(call, *arguments, **options):
    with pytest.raises(RuntimeError) as caught:
        call(*arguments, **options)
    assert type(caught.value) is RuntimeError, caught.type
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500 and ".cpp" not in text, text
    return text


def fake_refusal(call, inputs, out=None, **options):
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        converted = [None if t is None else mode.from_tensor(t) for t in inputs]
        fakes = {name: mode.from_tensor(t) for name, t in (out or {}).items()}
        return refusal(call, *converted, **fakes, **options)


def frozen(tensors):
    return [None if t is None or t.is_meta else as_bytes(t) for t in tensors]


def given(device):
    inputs, exact = case(SMALL)
    inputs = inputs.tokens(slice(3)).map(lambda t: t.clone().to(device))
    return inputs, buffers(Read(*(t[:3] for t in exact)), inputs, device)


@pytest.mark.parametrize("name, change", EVERY, ids=lambda v: getattr(v, "__name__", v))
def test_each_input(device, name, change):
    inputs, out = given(device)
    bad = inputs._replace(**{name: change(getattr(inputs, name))})
    before = frozen([*bad, *out.values()])
    text = refusal(op.fused_gr_read, *bad)
    assert f"'{NAMED_INSTEAD.get((name, change.__name__), name)}'" in text, text
    assert refusal(op.fused_gr_read_, *bad) == text
    assert refusal(op.fused_gr_read.out, *bad, q8_1=True, **out) == text
    assert refusal(strata_ops.fused_gr_read, *bad) == text
    assert all(b is None or torch.equal(a, b) for a, b in zip(frozen([*bad, *out.values()]), before))
    if change is not in_bytes:  # a fake tensor knows only its offset in the storage
        assert fake_refusal(op.fused_gr_read, bad) == text
        assert fake_refusal(op.fused_gr_read_, bad) == text
        assert fake_refusal(op.fused_gr_read.out, bad, out, q8_1=True) == text


@pytest.mark.parametrize("bf16", [False, True])
def test_streams_of_two_dtypes(device, bf16):
    """`residual` may be of either dtype; what is written into it and what it becomes are of the same."""
    inputs, _ = given(device)
    inputs = inputs.bf16_streams() if bf16 else inputs
    out = buffers(Read(*(t[:3] for t in case(SMALL, True, bf16)[1])), inputs, device)
    own, other = ("torch.bfloat16", "torch.float32") if bf16 else ("torch.float32", "torch.bfloat16")
    mixed = inputs._replace(block_out=other_float(inputs.block_out))
    text = refusal(op.fused_gr_read, *mixed)
    assert f"'block_out' must be {own} like 'residual', but is {other}" in text, text
    assert text == refusal(op.fused_gr_read_, *mixed) == fake_refusal(op.fused_gr_read_, mixed)
    assert text == refusal(op.fused_gr_read.out, *mixed, q8_1=True, **out)
    for name in ("mixed", "residual_out"):  # `mixed` is float32 always
        wrong = dict(out, **{name: other_float(out[name])})
        text = refusal(op.fused_gr_read.out, *inputs, q8_1=True, **wrong)
        assert f"'{name}'" in text and text == fake_refusal(op.fused_gr_read.out, inputs, wrong, q8_1=True)
    text = refusal(op.fused_gr_read, *inputs._replace(residual=inputs.residual.half()))
    assert "'residual' must be torch.float32 or torch.bfloat16, but is torch.float16" in text, text


OUT_CHANGES = [*DTYPES, *SHAPES, on_meta, strided, transposed, in_bytes]


@pytest.mark.parametrize("change", OUT_CHANGES, ids=lambda v: v.__name__)
@pytest.mark.parametrize("name", OUTPUTS)
def test_each_buffer(device, name, change):
    inputs, out = given(device)
    if name == "q8_1_out" and change in (strided, transposed):
        bad = dict(out, q8_1_out=out[name].transpose(0, 1).contiguous().transpose(0, 1))
    else:
        bad = dict(out, **{name: change(out[name])})
    before = frozen([*inputs, *bad.values()])
    text = refusal(op.fused_gr_read.out, *inputs, q8_1=True, **bad)
    assert f"'{name}'" in text, text
    assert all(b is None or torch.equal(a, b) for a, b in zip(frozen([*inputs, *bad.values()]), before))
    if change is not in_bytes:
        assert fake_refusal(op.fused_gr_read.out, inputs, bad, q8_1=True) == text


@pytest.mark.parametrize("name", ["inject", "residual_out", "q8_1_out"])
def test_a_buffer_for_what_is_not_asked_for(device, name):
    inputs, out = given(device)
    asked = inputs.ask(inject=name != "inject", fold=name != "residual_out")
    text = refusal(op.fused_gr_read.out, *asked, q8_1=name != "q8_1_out", **out)
    assert f"'{name}'" in text, text


@pytest.mark.parametrize("change", [strided, transposed, misaligned, in_bytes], ids=lambda v: v.__name__)
@pytest.mark.parametrize("bf16", [False, True])
def test_the_stream_in_place(device, bf16, change):
    """As an input any layout is welcome, to be written it is not."""
    inputs, _ = given(device)
    inputs = inputs.bf16_streams() if bf16 else inputs
    bad = inputs._replace(residual=change(inputs.residual))
    before = frozen(bad)
    text = refusal(op.fused_gr_read_, *bad)
    assert "'residual'" in text
    assert all(torch.equal(a, b) for a, b in zip(frozen(bad), before))
    if change is not in_bytes:
        assert fake_refusal(op.fused_gr_read_, bad) == text
    no_write = bad.ask(fold=False)
    assert refusal(op.fused_gr_read_, *no_write) == text, "the rule does not depend on what is pending"


@pytest.mark.parametrize("missing", ["block_out", "inject_prev"])
def test_half_a_pair(device, missing):
    inputs, _ = given(device)
    half = inputs._replace(**{missing: None})
    text = refusal(op.fused_gr_read, *half)
    assert "'block_out'" in text and "'inject_prev'" in text
    assert text == refusal(op.fused_gr_read_, *half) == fake_refusal(op.fused_gr_read, half)


@pytest.mark.parametrize("eps", [math.nan, -1e-6, -1e-60, -math.inf])
def test_eps(device, eps):
    inputs, out = given(device)
    before = frozen([*inputs, *out.values()])
    text = refusal(op.fused_gr_read, *inputs, eps=eps)
    assert "'eps'" in text
    assert text == refusal(op.fused_gr_read_, *inputs, eps=eps) == fake_refusal(op.fused_gr_read, inputs, eps=eps)
    assert text == refusal(op.fused_gr_read.out, *inputs, eps=eps, q8_1=True, **out)
    assert all(torch.equal(a, b) for a, b in zip(frozen([*inputs, *out.values()]), before))


UNSUPPORTED = [((48, 4, 8), "residual"), ((32, 9, 8), "residual"), ((32, 4, 12), "w_down")]


@pytest.mark.parametrize("geometry, name", UNSUPPORTED)
def test_geometries(device, geometry, name):
    inputs = make_inputs(geometry, 2).map(lambda t: t.to(device))
    text = refusal(op.fused_gr_read, *inputs)
    assert f"'{name}'" in text
    assert text == fake_refusal(op.fused_gr_read, inputs)


@pytest.mark.parametrize("empty", ["N", "HC", "LR"])
def test_empty_geometries(device, empty):
    width, streams, rank = (0 if name == empty else size for name, size in zip(("N", "HC", "LR"), SMALL))
    inputs = Inputs(
        torch.zeros(2, streams, width),
        torch.zeros(streams, width),
        torch.zeros(rank, streams * width).bfloat16(),
        torch.zeros(streams * width, rank).bfloat16(),
    ).map(lambda t: t.to(device))
    assert f"'{'w_down' if empty == 'LR' else 'residual'}'" in refusal(op.fused_gr_read, *inputs)


def test_overlap(device):
    """What is written shares no byte with an input or another buffer."""
    inputs, out = given(device)
    for name, other in itertools.product(OUTPUTS, [*ACTIVATIONS, *WEIGHTS, *OUTPUTS]):
        if name == other:
            continue
        size = max(t.nbytes for t in (out[name], {**inputs._asdict(), **out}[other]))
        shared = torch.zeros(size, dtype=torch.uint8, device=device)

        these, those = dict(out), inputs
        these[name] = at(shared, out[name])
        if other in out:
            these[other] = at(shared, out[other])
        else:
            value = getattr(inputs, other)
            those = inputs._replace(**{other: at(shared, value).copy_(value)})
        before = as_bytes(shared)
        text = refusal(op.fused_gr_read.out, *those, q8_1=True, **these)
        assert f"'{name}'" in text and f"'{other}'" in text, text
        assert torch.equal(as_bytes(shared), before)
    for other in [*ACTIVATIONS[1:], "w_norm"]:
        value = getattr(inputs, other)
        shared = torch.zeros(inputs.residual.numel(), device=device)
        those = inputs._replace(
            **{"residual": shared.view(inputs.residual.shape), other: shared[: value.numel()].view(value.shape)}
        )
        text = refusal(op.fused_gr_read_, *those)
        assert "'residual'" in text and f"'{other}'" in text, text
        assert text == fake_refusal(op.fused_gr_read_, those)


@pytest.mark.parametrize("bf16", [False, True])
def test_neighbours_in_memory_are_no_overlap(device, bf16):
    """Tensors that touch are separate."""
    inputs, exact = case(SMALL, bf16=bf16)
    inputs = inputs.tokens(slice(2)).map(lambda t: t.to(device))
    exact = Read(*(t[:2] for t in exact))
    out = buffers(exact, inputs, device)
    side_by_side = {**out, "residual": inputs.residual}
    shared = torch.zeros(sum(t.nbytes + 15 for t in side_by_side.values()), dtype=torch.uint8, device=device)
    start, placed = 0, {}
    for name, t in side_by_side.items():
        placed[name] = at(shared[start:], t)
        start += -(-t.nbytes // 16) * 16
    stream = placed.pop("residual").copy_(inputs.residual)
    op.fused_gr_read.out(*inputs._replace(residual=stream), q8_1=True, **placed)
    assert_same(named(placed.values()), exact)
    # inputs may share among themselves
    same = inputs._replace(w_up=inputs.w_down.view(inputs.w_up.shape))
    assert_same(named(op.fused_gr_read(*same)), named(op.fused_gr_read(*same.map(torch.clone))))


NOT_WITH_GRADIENTS = {
    "q8_1": lambda inputs, out: strata_ops.fused_gr_read(*inputs, q8_1=True),
    "in-place": lambda inputs, out: strata_ops.fused_gr_read_(*inputs),
    "with buffers": lambda inputs, out: strata_ops.fused_gr_read_out(*inputs, out=out),
}


@pytest.mark.parametrize("what", NOT_WITH_GRADIENTS)
def test_gradients_that_are_not_offered(device, what):
    """Before anything is written, a leaf or not; under no_grad there is nothing to give."""
    inputs, _ = given(device)
    out = strata_ops.fused_gr_read(*inputs)
    for name in inputs._fields:
        leaf = getattr(inputs, name).clone().requires_grad_()
        for asking in (leaf, leaf.view_as(leaf)):
            asked = inputs._replace(**{name: asking})
            before = frozen([*asked, *out])
            text = refusal(NOT_WITH_GRADIENTS[what], asked, out)
            assert f"'{name}'" in text and what in text, text
            assert all(b is None or torch.equal(a, b) for a, b in zip(frozen([*asked, *out]), before))
        with torch.no_grad():
            NOT_WITH_GRADIENTS[what](inputs._replace(**{name: leaf.detach().clone()}), out)


def test_a_buffer_that_requires_grad(device):
    inputs, _ = given(device)
    out = strata_ops.fused_gr_read(*inputs)
    out.lo.requires_grad_()
    assert "'lo' requires grad" in refusal(strata_ops.fused_gr_read_out, *inputs, out=out)


def test_forward_mode(device):
    """The op would forget a tangent without a word."""
    inputs, _ = given(device)
    with forward_ad.dual_level():
        strata_ops.fused_gr_read(*inputs)  # no tangent, nothing to refuse
        for name in inputs._fields:
            primal = getattr(inputs, name)
            dual = inputs._replace(**{name: forward_ad.make_dual(primal, torch.ones_like(primal))})
            for call in (strata_ops.fused_gr_read, strata_ops.fused_gr_read_):
                assert f"'{name}' has a tangent" in refusal(call, *dual)
    with pytest.raises(RuntimeError, match="'residual' has a tangent"):
        torch.func.jvp(lambda r: strata_ops.fused_gr_read(r, *inputs[1:]).mixed, inputs[:1], inputs[:1])


def test_unknown_variant(device):
    inputs, _ = given(device)
    text = refusal(strata_ops.debug.fused_gr_read, *inputs, variant="fastest")
    assert "fastest" in text


def test_refused_at_the_models_geometry(device):
    """Nothing here depends on the geometry, but the tuned kernels are there."""
    inputs = make_inputs(MODEL, 2).map(lambda t: t.to(device))
    for name, change in (("w_down", misaligned), ("w_up", other_dtype), ("block_out", one_less)):
        assert f"'{name}'" in refusal(op.fused_gr_read, *inputs._replace(**{name: change(getattr(inputs, name))}))
