"""Gradients: the formulae against numerical ones in fp64, the op's against fp64's, and how autograd is served."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import strata_ops
from strata_ops.autograd import gradients
from strata_ops.reference import FACTOR, read_eager, read_fp64
from support import MODEL, SMALL, Inputs, as_bytes, assert_same, make_inputs

ASKED = [(True, True), (True, False), (False, True), (False, False)]  # fold, inject
FLOATS = 5  # outputs that have gradients


class Formulae(torch.autograd.Function):
    """The read in fp64 with our gradients."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        read = read_fp64(*inputs)
        nothing = inputs[0].new_empty(0)
        return tuple(nothing.clone() if t is None else t for t in read[:FLOATS])

    @staticmethod
    def backward(ctx, *cotangents):
        return gradients(ctx.saved_tensors, cotangents, 1e-6, ctx.needs_input_grad)


def double(inputs):
    return inputs.map(lambda t: t.detach().double().requires_grad_())


@pytest.mark.parametrize("fold, inject", ASKED)
@pytest.mark.parametrize("geometry", [(32, 1, 8), (32, 3, 8)], ids=str)
def test_formulae(geometry, fold, inject):
    """First and second derivatives against differences of the reference. Every entry of the first ones."""
    torch.set_num_threads(1)  # thousands of tiny reads
    inputs = double(make_inputs(geometry, 2, seed=2).ask(fold=fold, inject=inject))
    torch.autograd.gradcheck(Formulae.apply, tuple(inputs), atol=1e-7, rtol=1e-5)
    torch.autograd.gradgradcheck(Formulae.apply, tuple(inputs), atol=1e-6, rtol=1e-4, fast_mode=True)


def cotangents_of(read, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator).to(t.device) for t in read[:FLOATS] if t is not None]


def gradients_by(function, inputs, cotangents=None):
    """By autograd, for all inputs."""
    inputs = inputs.map(lambda t: t.detach().clone().requires_grad_())
    outputs = [t for t in function(*inputs)[:FLOATS] if t is not None]
    cotangents = cotangents_of(outputs) if cotangents is None else cotangents
    wanted = [t for t in inputs if t is not None]
    found = iter(torch.autograd.grad(outputs, wanted, [c.to(o.dtype) for c, o in zip(cotangents, outputs)]))
    return inputs.map(lambda t: next(found))


@pytest.mark.parametrize("fold, inject", ASKED)
@pytest.mark.parametrize("geometry", [MODEL, SMALL], ids=str)
def test_as_near_the_truth_as_eager(device, geometry, fold, inject):
    """At most FACTOR times the error of PyTorch's own fp32 gradients, or FACTOR units in the last place of the largest
    value; gradients of bf16 weights are besides rounded once."""
    inputs = make_inputs(geometry, 4, seed=3).ask(fold=fold, inject=inject)
    truth = gradients_by(read_fp64, double(inputs))
    eager = gradients_by(read_eager, inputs.map(torch.Tensor.float))
    ours = gradients_by(strata_ops.fused_gr_read, inputs.map(lambda t: t.to(device)))
    for name, given, ours_, eager_, truth_ in zip(Inputs._fields, inputs, ours, eager, truth):
        if given is None:
            continue
        assert (ours_.dtype, ours_.shape) == (given.dtype, given.shape)
        error = (eager_.double() - truth_).abs().max()
        bound = FACTOR * max(error, 2.0**-23 * truth_.abs().max())
        rounding = 2.0**-8 * truth_.abs() if given.dtype == torch.bfloat16 else 0
        assert ((ours_.cpu().double() - truth_).abs() <= bound + rounding).all(), name


@pytest.mark.parametrize("fold, inject", ASKED)
def test_the_same_bytes_with_gradients(device, fold, inject):
    inputs = make_inputs(SMALL, 3).ask(fold=fold, inject=inject).map(lambda t: t.to(device))
    plain = strata_ops.fused_gr_read(*inputs, eps=1e-3)
    for name, given in inputs._asdict().items():
        if given is None:
            continue
        asking = inputs._replace(**{name: given.clone().requires_grad_()})
        read = strata_ops.fused_gr_read(*asking, eps=1e-3)
        assert_same(read, plain)
        assert all(t is None or t.requires_grad for t in read)
        with torch.no_grad():
            assert not any(t is not None and t.requires_grad for t in strata_ops.fused_gr_read(*asking))


def test_bf16_streams(device):
    """Their gradients are those of fp32 streams that hold the stored values, rounded once; the write's rounding counts
    as the identity."""
    inputs = make_inputs(SMALL, 3).map(lambda t: t.to(device)).bf16_streams()
    read = strata_ops.fused_gr_read(*inputs)
    cotangents = [c.bfloat16().float() for c in cotangents_of(read)]
    ours = gradients_by(strata_ops.fused_gr_read, inputs, cotangents)
    stored = inputs._replace(residual=read.residual_out.float(), block_out=None, inject_prev=None)
    of_stored = gradients_by(strata_ops.fused_gr_read, stored, [*cotangents[:2], *cotangents[3:]])
    through = of_stored.residual + cotangents[2]  # what reaches R'
    gain = 2 * torch.sigmoid(inputs.inject_prev / SMALL[1]).unsqueeze(-1)
    for name, expected in (("residual", through), ("block_out", (gain * through).sum(-2))):
        given = getattr(ours, name)
        assert given.dtype == torch.bfloat16
        assert ((given.float() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-5 * expected.abs().max()).all(), name
    for name in ("w_norm", "w_down", "w_up", "w_inject"):
        torch.testing.assert_close(getattr(ours, name), getattr(of_stored, name), atol=1e-4, rtol=2.0**-7)


def test_one_wanted_gradient_is_the_one_of_all(device):
    inputs = make_inputs(SMALL, 3).map(lambda t: t.to(device))
    cotangents = cotangents_of(strata_ops.fused_gr_read(*inputs))
    every = gradients_by(strata_ops.fused_gr_read, inputs, cotangents)
    for name, given in inputs._asdict().items():
        leaf = given.clone().requires_grad_()
        read = strata_ops.fused_gr_read(*inputs._replace(**{name: leaf}))
        torch.autograd.backward(read[:FLOATS], cotangents)
        assert torch.equal(as_bytes(leaf.grad), as_bytes(getattr(every, name))), name


def test_eps_is_the_reads(device):
    inputs = make_inputs(SMALL, 2).map(lambda t: t.to(device))

    def with_eps(read):
        return lambda *given: read(*given, eps=10.0)

    truth = gradients_by(with_eps(read_fp64), double(inputs.map(torch.Tensor.cpu)))
    ours = gradients_by(with_eps(strata_ops.fused_gr_read), inputs)
    assert torch.allclose(ours.residual.cpu().double(), truth.residual, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (4,), (2, 1, 2)], ids=str)
def test_leading_dimensions(device, lead):
    """Also none, and no token at all; strided activations."""
    count = torch.Size(lead).numel()
    inputs = make_inputs(SMALL, 4).tokens(slice(count))
    shaped = inputs._replace(
        **{
            name: getattr(inputs, name).reshape(*lead, *getattr(inputs, name).shape[1:]).mT.contiguous().mT
            for name in ("residual", "block_out", "inject_prev")
            if lead or name == "residual"
        }
    )
    if not lead:
        shaped = shaped._replace(block_out=inputs.block_out[0], inject_prev=inputs.inject_prev[0])
    flat, ours = (gradients_by(strata_ops.fused_gr_read, i.map(lambda t: t.to(device))) for i in (inputs, shaped))
    for name, given, of_flat, of_shaped in zip(Inputs._fields, shaped, flat, ours):
        assert of_shaped.shape == given.shape, name
        relative = 2.0**-7 if given.dtype == torch.bfloat16 else 1e-4  # a sum of another order, then rounded
        assert torch.allclose(of_flat.flatten(), of_shaped.flatten(), rtol=relative, atol=1e-5), name


def test_only_inputs_are_kept(device):
    inputs = make_inputs(SMALL, 3).map(lambda t: t.to(device).requires_grad_())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        strata_ops.fused_gr_read(*inputs)
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in inputs]


def test_a_stream_changed_since_is_told(device):
    inputs = make_inputs(SMALL, 2).map(lambda t: t.to(device))
    w_up = inputs.w_up.clone().requires_grad_()
    read = strata_ops.fused_gr_read(*inputs._replace(w_up=w_up))
    strata_ops.fused_gr_read_(*inputs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        read.mixed.sum().backward()


def test_autocast_changes_nothing(device):
    inputs = make_inputs(SMALL, 3).map(lambda t: t.to(device))
    cotangents = cotangents_of(strata_ops.fused_gr_read(*inputs))
    plain = gradients_by(strata_ops.fused_gr_read, inputs, cotangents)
    with torch.autocast(device, dtype=torch.bfloat16):
        automatic = gradients_by(strata_ops.fused_gr_read, inputs, cotangents)
    for name, a, p in zip(Inputs._fields, automatic, plain):
        assert torch.equal(as_bytes(a), as_bytes(p)), name


def test_gradients_of_gradients(device):
    """A gradient penalty, against fp64."""

    def penalty(read, inputs):
        inputs = inputs.map(lambda t: t.detach().clone().requires_grad_())
        mixed = read(*inputs)[0]
        (slope,) = torch.autograd.grad(mixed.square().sum(), inputs.residual, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [inputs.block_out, inputs.w_norm, inputs.residual])

    inputs = make_inputs(SMALL, 2, seed=4)
    truth = penalty(read_fp64, double(inputs))
    for ours, exact in zip(penalty(strata_ops.fused_gr_read, inputs.map(lambda t: t.to(device))), truth):
        assert (ours.cpu().double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fold, inject", ASKED)
def test_compile_in_one_frame(device, fold, inject, backend):
    """fullgraph, dynamic, forward and backward; the same bytes."""
    torch._dynamo.reset()
    frames = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, dynamic=True, backend=frames)
    def read(*inputs):
        return strata_ops.fused_gr_read(inputs[0] * 1, *inputs[1:])

    for tokens in (2, 3, 8, 9, 17, 5):
        inputs = make_inputs(SMALL, tokens).ask(fold=fold, inject=inject).map(lambda t: t.to(device))
        compiled, plain = gradients_by(read, inputs), gradients_by(strata_ops.fused_gr_read, inputs)
        for name, c, p in zip(Inputs._fields, compiled, plain):
            assert p is None or torch.equal(as_bytes(c), as_bytes(p)), f"T={tokens} {name}"
    assert frames.frame_count == 1


def test_torch_func(device):
    """grad, vjp and jacrev give autograd's gradients; vmap over them, one for each token."""
    inputs = make_inputs(SMALL, 3).map(lambda t: t.to(device))

    def mixed(residual):
        return strata_ops.fused_gr_read(residual, *inputs[1:]).mixed

    cotangent = torch.ones_like(mixed(inputs.residual))
    leaf = inputs.residual.clone().requires_grad_()
    (plain,) = torch.autograd.grad(mixed(leaf), leaf, cotangent)
    assert torch.equal(torch.func.grad(lambda r: mixed(r).sum())(inputs.residual), plain)
    assert torch.equal(torch.func.vjp(mixed, inputs.residual)[1](cotangent)[0], plain)
    rows = torch.func.jacrev(lambda r: mixed(r)[:, :2])(inputs.residual)
    assert rows.shape == (3, 2, 3, 3, 96) and rows[0, 0, 1].abs().max() == 0 < rows[0, 0, 0].abs().max()

    def of_one(w_up, *activations):
        residual, block_out, inject_prev = activations
        read = strata_ops.fused_gr_read(residual, *inputs[1:3], w_up, inputs.w_inject, block_out, inject_prev)
        return read.mixed.sum()

    activations = inputs.residual, inputs.block_out, inputs.inject_prev
    each = torch.vmap(torch.func.grad(of_one), (None, 0, 0, 0))(inputs.w_up, *activations)
    for token in range(3):
        one = torch.func.grad(of_one)(inputs.w_up, *(t[token] for t in activations))
        assert torch.allclose(each[token].float(), one.float(), rtol=2**-7, atol=1e-6)
