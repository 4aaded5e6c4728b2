"""The op as PyTorch sees it: schemas, fake kernels, functionalisation, compile, export, autograd."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import strata_ops
from support import MODEL, OPTIONS, SMALL, as_bytes, assert_same, case, cut, make_inputs, named
from test_read import buffers

op = torch.ops.strata


def asked(geometry, tokens, fold, inject, q8_1, device, bf16=False):
    inputs, exact = case(geometry, fold, bf16)
    index = slice(tokens)
    inputs = inputs.tokens(index).ask(inject=inject).map(lambda t: t.clone().to(device))
    return inputs, cut(exact, index, inject=inject, q8_1=q8_1)


@pytest.mark.parametrize("fold, inject, q8_1", OPTIONS)
@pytest.mark.parametrize("tokens, bf16", [(0, False), (1, False), (3, False), (2, True)])
def test_opcheck(device, tokens, bf16, fold, inject, q8_1):
    inputs, expected = asked(SMALL, tokens, fold, inject, q8_1, device, bf16)
    torch.library.opcheck(op.fused_gr_read.default, tuple(inputs), {"q8_1": q8_1})
    torch.library.opcheck(op.fused_gr_read_.default, tuple(inputs), {"q8_1": q8_1})
    out = buffers(expected, inputs, device)
    torch.library.opcheck(op.fused_gr_read.out, tuple(inputs), {"q8_1": q8_1, **out})


def test_opcheck_at_the_models_geometry(device):
    inputs, expected = asked(MODEL, 2, True, True, True, device)
    torch.library.opcheck(op.fused_gr_read.default, tuple(inputs), {"q8_1": True})
    torch.library.opcheck(op.fused_gr_read_.default, tuple(inputs), {"q8_1": True})
    torch.library.opcheck(op.fused_gr_read.out, tuple(inputs), {"q8_1": True, **buffers(expected, inputs, device)})


def test_schemas():
    """What is written is marked, and nothing else; no output aliases an input."""
    arguments = "Tensor w_norm, Tensor w_down, Tensor w_up, Tensor? w_inject=None, Tensor? block_out=None, "
    arguments += "Tensor? inject_prev=None, *, float eps=1e-06, bool q8_1=False"
    outputs = "Tensor mixed, Tensor inject, Tensor residual_out, Tensor lo, Tensor rs, Tensor q8_1"
    buffers = "Tensor(a!) mixed, Tensor(b!) inject, Tensor(c!) residual_out, Tensor(d!) lo, Tensor(e!) rs, "
    expected = {
        "default": f"strata::fused_gr_read(Tensor residual, {arguments}) -> ({outputs})",
        "out": f"strata::fused_gr_read.out(Tensor residual, {arguments}, {buffers}Tensor(f!) q8_1_out) -> ()",
    }

    def schema(overload):
        return str(overload._schema).replace("9.9999999999999995e-07", "1e-06")

    assert schema(op.fused_gr_read.default) == expected["default"]
    assert schema(op.fused_gr_read.out) == expected["out"]
    in_place = f"strata::fused_gr_read_(Tensor(a!) residual, {arguments}) -> "
    in_place += f"({outputs.replace('Tensor residual_out, ', '')})"
    assert schema(op.fused_gr_read_.default) == in_place


@pytest.mark.parametrize("fold, inject, q8_1", OPTIONS)
@pytest.mark.parametrize("lead", [(0,), (3,), (2, 2), ()], ids=str)
@pytest.mark.parametrize("bf16", [False, True])
def test_fake_and_meta_tell_the_shapes(device, bf16, lead, fold, inject, q8_1):
    inputs = make_inputs(SMALL, 4).ask(fold=fold, inject=inject)
    inputs = inputs.bf16_streams() if bf16 else inputs
    count = torch.Size(lead).numel()

    def shaped(t):
        return None if t is None else t[:count].reshape(*lead, *t.shape[1:]).to(device)

    inputs = inputs.map(lambda t: t.to(device))._replace(
        residual=shaped(inputs.residual), block_out=shaped(inputs.block_out), inject_prev=shaped(inputs.inject_prev)
    )
    real = op.fused_gr_read(*inputs, q8_1=q8_1)
    with FakeTensorMode() as mode:
        fake = op.fused_gr_read(*inputs.map(mode.from_tensor), q8_1=q8_1)
    meta = op.fused_gr_read(*inputs.map(lambda t: t.to("meta")), q8_1=q8_1)
    for r, f, m in zip(real, fake, meta, strict=True):
        assert (r.shape, r.dtype, r.stride(), r.device) == (f.shape, f.dtype, f.stride(), f.device)
        assert (r.shape, r.dtype, r.stride(), "meta") == (m.shape, m.dtype, m.stride(), m.device.type)


def test_vmap_over_activations(device):
    """The bytes of one read; a batch anywhere, activations without one, two batches, weights in the closure."""
    inputs, exact = asked(SMALL, 4, True, True, True, device)

    def read(residual, block_out, inject_prev):
        return torch.vmap(
            lambda r, b, p: tuple(op.fused_gr_read(r, *inputs[1:5], b, p, q8_1=True)), in_dims=(1, None, 0)
        )(residual, block_out, inject_prev)

    same = inputs.block_out[0]
    batch = inputs.residual.movedim(0, 1)
    expected = op.fused_gr_read(*inputs._replace(block_out=same.expand(4, -1)), q8_1=True)
    assert_same(named(read(batch, same, inputs.inject_prev)), named(expected))

    pairs = inputs.map(lambda t: t)._replace(
        **{n: getattr(inputs, n).unflatten(0, (2, 2)) for n in ("residual", "block_out", "inject_prev")}
    )
    twice = torch.vmap(torch.vmap(lambda r, b, p: strata_ops.fused_gr_read(r, *inputs[1:5], b, p).mixed))
    mixed = twice(pairs.residual, pairs.block_out, pairs.inject_prev)
    assert torch.equal(as_bytes(mixed), as_bytes(exact.mixed)) and mixed.shape[:2] == (2, 2)


def test_vmap_says_no(device):
    inputs, exact = asked(SMALL, 2, False, True, False, device)
    residual, *weights = inputs[:5]
    with pytest.raises(RuntimeError, match="vmap over 'w_up' is not offered"):
        torch.vmap(lambda w: op.fused_gr_read(residual, *weights[:2], w).mixed)(weights[2].expand(2, -1, -1))
    with pytest.raises(RuntimeError, match="vmap does not take the in-place form"):
        torch.vmap(lambda r: op.fused_gr_read_(r, *weights).mixed)(residual)
    out = buffers(exact, inputs, device)
    with pytest.raises(RuntimeError, match=r"vmap|[Bb]atching"):  # torch's own words
        torch.vmap(lambda r: op.fused_gr_read.out(r, *weights, **out))(residual)


def counting(backend):
    """A backend that counts what it is asked to compile; these two need no C compiler."""
    torch._dynamo.reset()
    return CompileCounterWithBackend(backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fold, inject, q8_1", OPTIONS)
def test_compile_in_one_frame(device, fold, inject, q8_1, backend):
    """fullgraph, dynamic: from two tokens on, no number of them is compiled anew; and it is eager's bytes."""
    frames = counting(backend)

    @torch.compile(fullgraph=True, dynamic=True, backend=frames)
    def read(inputs):
        residual = inputs.residual * 1  # so that there is something beside the op
        return strata_ops.fused_gr_read(residual, *inputs[1:], q8_1=q8_1)

    counts = set()
    for tokens in (2, 3, 8, 9, 17, 5):
        inputs, expected = asked(SMALL, tokens, fold, inject, q8_1, device)
        assert_same(read(inputs), expected, f"T={tokens}")
        counts.add(frames.frame_count)
    # aot_eager may be asked twice in the first call: dynamic=True tries eps as a symbol, and thinks better of it
    assert counts == {1} or (backend == "aot_eager" and counts == {2})
    for tokens in (0, 1):
        inputs, expected = asked(SMALL, tokens, fold, inject, q8_1, device)
        assert_same(read(inputs), expected, f"T={tokens}")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", ["functional", "in place", "out"])
@pytest.mark.parametrize("bf16", [False, True])
def test_compile_each_form(device, bf16, form, backend):
    """The mutating ones too: what was written is there after the call, seen by what the graph does next."""
    frames = counting(backend)
    inputs, exact = asked(MODEL, 3, True, True, True, device, bf16)

    @torch.compile(fullgraph=True, backend=frames)
    def read(inputs, out):
        stream = inputs.residual.clone()
        inputs = inputs._replace(residual=stream)
        if form == "functional":
            result = named(op.fused_gr_read(*inputs, q8_1=True))
        elif form == "in place":
            result = named(op.fused_gr_read_(*inputs, q8_1=True), stream)
        else:
            op.fused_gr_read.out(*inputs, q8_1=True, **out)
            result = named(out.values())
        return result, result.residual_out + 1

    out = buffers(exact, inputs, device)
    result, more = read(inputs, out)
    assert_same(result, exact)
    assert torch.equal(as_bytes(more), as_bytes(exact.residual_out + 1)) and frames.frame_count == 1
    if form == "out":
        assert_same(named(out.values()), exact, "the caller's buffers")


@pytest.mark.parametrize("fold, inject, q8_1", [(True, True, True), (False, False, False)])
def test_export(device, fold, inject, q8_1):
    class Layer(torch.nn.Module):
        def forward(self, *inputs):
            return [t for t in strata_ops.fused_gr_read(*inputs, q8_1=q8_1) if t is not None]

    inputs, _ = asked(SMALL, 3, fold, inject, q8_1, device)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    fixed = {"residual", "block_out", "inject_prev"}
    shapes = [{0: tokens} if name in fixed and t is not None else None for name, t in inputs._asdict().items()]
    program = torch.export.export(Layer(), tuple(inputs), dynamic_shapes=(tuple(shapes),), strict=False)
    assert any(node.target is op.fused_gr_read.default for node in program.graph.nodes)
    for count in (2, 17):
        inputs, expected = asked(SMALL, count, fold, inject, q8_1, device)
        results = program.module()(*inputs)
        for result, wanted in zip(results, [t for t in expected if t is not None], strict=True):
            assert torch.equal(as_bytes(result), as_bytes(wanted))


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_parameters(device, strict):
    """Weights that require grad are exported as the op of inference."""

    class Layer(torch.nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.weights = torch.nn.ParameterList(map(torch.nn.Parameter, weights))

        def forward(self, residual):
            return strata_ops.fused_gr_read(residual, *self.weights).mixed

    inputs, expected = asked(SMALL, 3, False, True, False, device)
    program = torch.export.export(Layer(inputs[1:5]), (inputs.residual,), strict=strict).run_decompositions({})
    assert op.fused_gr_read.default in [node.target for node in program.graph.nodes]
    assert torch.equal(as_bytes(program.module()(inputs.residual)), as_bytes(expected.mixed))
