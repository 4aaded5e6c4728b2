"""strata_ops.nn.GatedResidual: the checkpoint's names, Transformers' results, what is derived from the parameters."""

import copy
import io

import pytest
import torch

from strata_ops import fused_gr_read, reference
from strata_ops.nn import GatedResidual, injection_weights
from support import MODEL, SMALL, as_bytes, make_inputs, need_transformers

Qwen4ExpTextConfig, Qwen4ExpTextGatedResidual = need_transformers()

GEOMETRIES = [MODEL, (2048, 4, 320), SMALL]
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def config(geometry):
    width, streams, rank = geometry
    return Qwen4ExpTextConfig(hidden_size=width, hc_count=streams, hc_lowrank=rank, rms_norm_eps=EPS)


def theirs_and_inputs(geometry, *, inject=True, tokens=4, seed=0, dtype=torch.float32, device="cpu"):
    """Transformers' module with a checkpoint's weights, and inputs with the same."""
    inputs = make_inputs(geometry, tokens, seed).ask(inject=inject)
    module = Qwen4ExpTextGatedResidual(config(geometry), use_combine=inject)
    with torch.no_grad():
        module.hc_norm.weight.copy_((inputs.w_norm - 1).bfloat16().flatten())
        module.input_mix_weight_down.weight.copy_(inputs.w_down)
        module.input_mix_weight_up.weight.copy_(inputs.w_up)
        if inject:
            module.block_inject_weight.weight.copy_(inputs.w_inject)
    gain = 1 + module.hc_norm.weight.detach().view(inputs.w_norm.shape)
    return module.to(device, dtype), inputs._replace(w_norm=gain).map(lambda t: t.to(device))


def same(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(as_bytes(actual), as_bytes(expected))


def flat(streams, dtype=torch.float32):
    return streams.flatten(-2).to(dtype)


@pytest.mark.parametrize("inject", [False, True])
def test_state_dict_goes_both_ways(inject):
    theirs, _ = theirs_and_inputs(SMALL, inject=inject)
    ours = GatedResidual.from_config(config(SMALL), use_combine=inject)
    ours.load_state_dict(theirs.state_dict())
    back = Qwen4ExpTextGatedResidual(config(SMALL), use_combine=inject)
    back.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        same(back.state_dict()[name], value)
    assert (ours.eps, ours.hc_lowrank) == (EPS, 24)
    assert ours.training and GatedResidual.from_transformers(theirs).training
    assert not GatedResidual.from_transformers(theirs.eval()).training


def test_fresh_parameters_are_a_plain_norm():
    ours = GatedResidual(*SMALL)
    assert not ours.hc_norm.weight.any() and ours.block_inject_weight is not None
    assert GatedResidual(*SMALL, use_combine=False).block_inject_weight is None
    assert all(w.dtype == torch.bfloat16 for w in GatedResidual(*SMALL, dtype=torch.bfloat16).parameters())


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("inject", [False, True])
@torch.no_grad()
def test_float32_is_the_op_and_near_transformers(device, geometry, inject):
    theirs, inputs = theirs_and_inputs(geometry, inject=inject, device=device)
    inputs = inputs.ask(fold=False, inject=inject)
    ours = GatedResidual.from_transformers(theirs)
    streams = flat(inputs.residual)
    op = fused_gr_read(*inputs, eps=EPS)
    bound = {k: 1.25 * v for k, v in reference.tolerance(*inputs.map(lambda t: t.cpu()), eps=EPS).items()}
    if not inject:
        mixed = ours(streams)
        same(mixed, op.mixed)
        assert (mixed - theirs(streams)).abs().max() <= bound["mixed"]
        return
    mixed, passed, weights = ours(streams)
    same(mixed, op.mixed)
    same(weights, 2 * torch.sigmoid(op.inject / geometry[1]))
    assert passed is streams
    expected = theirs(streams)
    assert (mixed - expected[0]).abs().max() <= bound["mixed"]
    assert (weights - expected[2]).abs().max() <= bound["inject"] / (2 * geometry[1]) + 2.0**-22


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@torch.no_grad()
def test_bfloat16_is_nearer_the_truth_than_transformers(device, geometry):
    theirs, inputs = theirs_and_inputs(geometry, dtype=torch.bfloat16, device=device)
    streams = flat(inputs.residual, torch.bfloat16)
    inputs = inputs.ask(fold=False)._replace(residual=streams.float().view(inputs.residual.shape))
    op = fused_gr_read(*inputs, eps=EPS)
    mixed, passed, weights = GatedResidual.from_transformers(theirs)(streams)
    same(mixed, op.mixed.bfloat16())
    same(weights, injection_weights(op.inject, torch.bfloat16))
    assert passed is streams
    truth = reference.read_fp64(*inputs.map(lambda t: t.cpu()), eps=EPS)
    by_theirs = theirs(streams)
    for value, other, exact in [
        (mixed, by_theirs[0], truth.mixed),
        (weights, by_theirs[2], 2 * torch.sigmoid(truth.inject / geometry[1])),
    ]:
        error, of_theirs = ((t.cpu().double() - exact).abs().mean() for t in (value, other))
        assert error < of_theirs
        assert (value.cpu().double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


@pytest.mark.parametrize("geometry", [MODEL, SMALL], ids=str)
@torch.no_grad()
def test_the_form_with_a_pending_write(device, geometry):
    theirs, inputs = theirs_and_inputs(geometry, device=device)
    ours = GatedResidual.from_transformers(theirs)
    op = fused_gr_read(*inputs, eps=EPS)
    batch = [flat(inputs.residual), inputs.block_out, inputs.inject_prev]
    mixed, landed, inject = ours.read(*(t.view(2, 2, -1) for t in batch))
    same(mixed.flatten(0, 1), op.mixed)
    same(landed.flatten(0, 1), op.residual_out.flatten(-2))
    same(inject.flatten(0, 1), op.inject)
    # The same write, landed as a Transformers layer does it, and the module called: near, since that rounds twice.
    weights = injection_weights(inputs.inject_prev, torch.float32)
    written = batch[0] + (inputs.block_out.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)
    assert (written.view_as(landed) - landed).abs().max() <= 2.0**-21 * landed.abs().max()
    again = ours(written)
    assert (again[0] - op.mixed).abs().max() <= 1e-5 * op.mixed.abs().max()


@pytest.mark.parametrize("geometry", [MODEL, SMALL], ids=str)
@torch.no_grad()
def test_a_pending_write_in_bfloat16(device, geometry):
    """The streams come back rounded to bf16 once, and are what this read and the next one see."""
    theirs, inputs = theirs_and_inputs(geometry, dtype=torch.bfloat16, device=device)
    inputs = inputs._replace(residual=inputs.residual.bfloat16(), block_out=inputs.block_out.bfloat16())
    ours = GatedResidual.from_transformers(theirs)
    op = fused_gr_read(*inputs, eps=EPS)
    read = ours.read(flat(inputs.residual, torch.bfloat16), inputs.block_out, inputs.inject_prev)
    same(read.mixed, op.mixed.bfloat16())
    same(read.hyper_input, op.residual_out.flatten(-2))
    same(read.inject, op.inject)
    after = ours.read(read.hyper_input)
    same(after.mixed, read.mixed)
    same(after.inject, read.inject)
    assert after.hyper_input is read.hyper_input and read.inject.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inject", [False, True])
def test_the_librarys_path_is_transformers_own(device, dtype, inject):
    """Bit for bit, with the gradients, wherever one is wanted; without one for more than 8 tokens, where asked for."""
    theirs, inputs = theirs_and_inputs(SMALL, inject=inject, tokens=9, dtype=dtype, device=device)
    ours = copy.deepcopy(GatedResidual.from_transformers(theirs, prefill="library"))

    def outputs(module, streams):
        results = module(streams)
        return [results] if not inject else [results[0], results[2]]

    results = []
    for module in (theirs, ours):
        streams = flat(inputs.residual, dtype).requires_grad_()
        values = outputs(module, streams)
        sum(v.float().square().sum() for v in values).backward()
        results.append([*values, streams.grad, *(w.grad for w in module.parameters())])
    for expected, actual in zip(*results, strict=True):
        same(actual, expected)
    with torch.no_grad():
        for expected, actual in zip(outputs(theirs, streams), outputs(ours, streams), strict=True):
            same(actual, expected)
        by_op = ours.read(streams[:8]).mixed
        same(outputs(ours, streams[:8])[0], by_op)
        assert not torch.equal(by_op, outputs(theirs, streams[:8])[0]), "both paths must be told apart here"


def test_read_has_gradients_too(device):
    """Of the parameters as well, though what the op reads is derived from them."""
    theirs, inputs = theirs_and_inputs(SMALL, device=device)
    gradients = []
    for module in (theirs, copy.deepcopy(GatedResidual.from_transformers(theirs))):
        streams, block_out = flat(inputs.residual).requires_grad_(), inputs.block_out.clone().requires_grad_()
        if module is theirs:
            weights = injection_weights(inputs.inject_prev, torch.float32)
            mixed, _, _ = module(streams + (block_out.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2))
        else:
            mixed = module.read(streams, block_out, inputs.inject_prev).mixed
        mixed.square().sum().backward()
        weights = (module.hc_norm, module.input_mix_weight_down, module.input_mix_weight_up)
        gradients.append([streams.grad, block_out.grad, *(holder.weight.grad for holder in weights)])
    for expected, actual in zip(*gradients, strict=True):
        assert (actual - expected).abs().max() <= 2.0**-8 * expected.abs().max()


def test_frozen_weights_want_no_gradient(device):
    theirs, inputs = theirs_and_inputs(SMALL, device=device)
    ours = GatedResidual.from_transformers(theirs.requires_grad_(False))
    streams = flat(inputs.residual)
    assert ours.reads_by_op(streams) and not ours.reads_by_op(streams.clone().requires_grad_())
    same(ours(streams)[0], ours.read(streams).mixed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_unchanged_parameters_are_not_copied(device, dtype):
    theirs, inputs = theirs_and_inputs(SMALL, dtype=dtype, device=device)
    ours = GatedResidual.from_transformers(theirs)
    first = ours._weights()
    ours(flat(inputs.residual, dtype))
    assert all(a is b for a, b in zip(first, ours._weights(), strict=True))
    read_in_place = first[1] is ours.input_mix_weight_down.weight
    assert read_in_place == (dtype == torch.bfloat16)
    assert not any(name[0] == "_" for name in ours.state_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_changed_parameters_are_seen(device, dtype):
    """In place, replaced, converted there and back to the same address, loaded, and moved."""
    theirs, inputs = theirs_and_inputs(SMALL, dtype=dtype, device=device)
    streams = flat(inputs.residual, dtype)
    ours = copy.deepcopy(GatedResidual.from_transformers(theirs))

    def is_fresh():
        fresh = GatedResidual.from_config(config(SMALL), device=device, dtype=dtype)
        fresh.load_state_dict(ours.state_dict())
        mixed, _, weights = ours(streams)
        for actual, expected in zip((mixed, weights), fresh(streams)[::2], strict=True):
            same(actual, expected)
        return torch.cat([mixed, weights], -1)

    before = is_fresh()
    held = [t.data_ptr() for t in ours._weights() if t is not None]
    for weight in ours.parameters():
        weight.mul_(2)
        after = is_fresh()
        assert not torch.equal(before, after)
        before = after
    assert held == [t.data_ptr() for t in ours._weights()], "a captured graph keeps reading these"
    ours.input_mix_weight_up.weight = torch.nn.Parameter(ours.input_mix_weight_up.weight / 4)
    is_fresh()
    ours.half().to(dtype)
    is_fresh()
    ours.load_state_dict(theirs.state_dict(), assign=True)
    is_fresh()
    ours.to("meta").to_empty(device=device).load_state_dict(theirs.state_dict())
    is_fresh()
    with torch.inference_mode():
        is_fresh()


def test_made_and_used_in_inference_mode(device):
    """Such tensors have no version counter."""
    theirs, inputs = theirs_and_inputs(SMALL, device=device)
    with torch.inference_mode():
        ours = GatedResidual.from_config(config(SMALL), device=device)
        ours.load_state_dict(theirs.state_dict())
        mixed = ours(flat(inputs.residual))[0]
    with torch.no_grad():
        same(ours(flat(inputs.residual))[0], mixed)


def test_prepared_in_inference_mode_and_changed_outside(device):
    theirs, inputs = theirs_and_inputs(SMALL, device=device)
    ours = GatedResidual.from_transformers(theirs).float()
    with torch.inference_mode():
        before = ours(flat(inputs.residual))[0]
    with torch.no_grad():
        ours.hc_norm.weight.add_(1)
        ours.input_mix_weight_up.weight.mul_(2)
        assert not torch.equal(ours(flat(inputs.residual))[0], before)


@torch.no_grad()
def test_no_new_parameter_comes_to_lie_where_the_old_one_was():
    """So an address tells whether a parameter is still the one that was prepared."""
    theirs, _ = theirs_and_inputs(SMALL)
    ours = GatedResidual.from_transformers(theirs)
    weight = ours.input_mix_weight_up.weight
    address, shape = weight.data_ptr(), weight.shape
    weight.data = torch.empty(0)
    assert address not in [t.data_ptr() for t in [torch.zeros(shape) for _ in range(8)]]


def test_copies_and_pickles(device):
    theirs, inputs = theirs_and_inputs(SMALL, device=device)
    ours = GatedResidual.from_transformers(theirs)
    file = io.BytesIO()
    torch.save(copy.deepcopy(ours), file)
    file.seek(0)
    with torch.no_grad():
        expected = ours(flat(inputs.residual))[0]
        ours.hc_norm.weight.add_(1)
        same(torch.load(file, weights_only=False)(flat(inputs.residual))[0], expected)


@torch.no_grad()
def test_weights_that_bf16_does_not_hold(device):
    theirs, inputs = theirs_and_inputs(SMALL, device=device)
    theirs.input_mix_weight_up.weight[5, 7] = 1 + 2.0**-12
    with pytest.raises(
        RuntimeError, match=r"bfloat16 does not hold 'input_mix_weight_up.weight' exactly.*round_weights"
    ):
        GatedResidual.from_transformers(theirs)
    rounding = GatedResidual.from_transformers(theirs, round_weights=True)
    actual = rounding(flat(inputs.residual))[0]
    same(
        actual,
        fused_gr_read(
            *inputs.ask(fold=False)._replace(w_up=theirs.input_mix_weight_up.weight.bfloat16()), eps=EPS
        ).mixed,
    )
    assert theirs.input_mix_weight_up.weight[5, 7] != 1, "the parameter itself stays"
    theirs.input_mix_weight_up.weight[5, 7] = 1
    GatedResidual.from_transformers(theirs)
    theirs.hc_norm.weight[0] = 2.0**-12  # the gain is float32
    GatedResidual.from_transformers(theirs)
    ours = GatedResidual.from_transformers(theirs)
    theirs.block_inject_weight.weight[0, 0] = 1 + 2.0**-12
    with pytest.raises(RuntimeError, match="bfloat16 does not hold 'block_inject"):
        ours(flat(inputs.residual))


@torch.no_grad()
def test_refusals():
    with pytest.raises(RuntimeError, match=r"^fused_gr_read: 'residual' must be .* multiple of 32"):
        GatedResidual(100, 4, 320)
    with pytest.raises(RuntimeError, match=r"^fused_gr_read: 'w_down'"):
        GatedResidual(96, 4, 30)
    with pytest.raises(RuntimeError, match="eps"):
        GatedResidual(*SMALL, eps=-1.0)
    with pytest.raises(RuntimeError, match="prefill is 'fast'"):
        GatedResidual(*SMALL, prefill="fast")
    ours = GatedResidual(*SMALL, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="hyper_input has 95 features; 3 streams of 96 were expected"):
        ours(torch.zeros(2, 95))
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(RuntimeError, match=rf"'residual' must be torch\.float32 or .* but is {dtype}"):
            ours(torch.zeros(2, 288, dtype=dtype))
    with pytest.raises(RuntimeError, match="'block_out'"):
        ours.read(torch.zeros(2, 288), inject_prev=torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="a Qwen4ExpTextGatedResidual is wanted, not a Linear"):
        GatedResidual.from_transformers(torch.nn.Linear(2, 2))
    theirs, _ = theirs_and_inputs(SMALL)
    theirs.input_mix_weight_down.weight = torch.nn.Parameter(torch.zeros(24, 144))
    with pytest.raises(RuntimeError, match=r"down\.weight' is Parameter \(24, 144\); a Parameter \(24, 288\)"):
        GatedResidual.from_transformers(theirs)

    class Quantised(torch.nn.Linear):
        pass

    theirs, _ = theirs_and_inputs(SMALL)
    theirs.input_mix_weight_up = Quantised(24, 288)
    with pytest.raises(RuntimeError, match=r"'input_mix_weight_up' is a Quantised; only nn\.Linear can be read"):
        GatedResidual.from_transformers(theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_compiles_whole(device, dtype):
    theirs, inputs = theirs_and_inputs(SMALL, dtype=dtype, device=device)
    ours = GatedResidual.from_transformers(theirs)
    streams, block_out = flat(inputs.residual, dtype), inputs.block_out.to(dtype)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(compiled(streams), ours(streams), strict=True):
        same(actual, expected)
    read = torch.compile(ours.read, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(
        read(streams, block_out, inputs.inject_prev), ours.read(streams, block_out, inputs.inject_prev), strict=True
    ):
        same(actual, expected)
