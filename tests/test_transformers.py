"""Patched models: a real Qwen4ExpForCausalLM with random weights, before and after, token for token."""

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import strata_ops.nn
from strata_ops import debug
from strata_ops.integrations.tiny_qwen4_exp import tiny_qwen4_exp
from strata_ops.integrations.transformers import patch, unpatch
from support import MODEL, SMALL, as_bytes, devices, need_transformers
from test_sim import needs_cards

_, Qwen4ExpTextGatedResidual = need_transformers()

HERE = Path(__file__).parent
STEPS = 256
# How far the logits of a patched float32 model may be from the unpatched model's, as a part of the largest logit. Both
# round each sum of the read in float32, in different orders; the most that was seen is 2^-20.
LOGITS = 2.0**-18


@pytest.fixture(autouse=True)
def _one_thread():
    """So much of a tiny model's time is spent between threads that one is faster."""
    torch.set_num_threads(1)


def tiny(geometry=SMALL, device="cpu", dtype=torch.float32, layers=2, **config):
    return tiny_qwen4_exp(*geometry, layers=layers, **config).to(device, dtype)


def prompt(device="cpu", tokens=12, batch=1):
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(1, 1024, (batch, tokens), generator=generator).to(device)


def greedy(model, ids, steps=STEPS, **options):
    """The new tokens. Nothing is compiled: Transformers would do so by itself for a static cache on a GPU."""
    mask = torch.ones_like(ids)
    options = {"do_sample": False, "max_new_tokens": steps, "disable_compile": True, "attention_mask": mask, **options}
    return model.generate(ids, **options)[:, ids.shape[1] :]


def reads_of(monkeypatch):
    """A list that gets an entry (tokens, whether a write came along) for each call of the op by a module."""
    calls = []
    real = strata_ops.nn.fused_gr_read

    def counted(streams, *rest, **options):
        if not streams.is_meta:
            calls.append((streams.shape[:-2].numel(), rest[-2] is not None))
        return real(streams, *rest, **options)

    monkeypatch.setattr(strata_ops.nn, "fused_gr_read", counted)
    return calls


def same(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(as_bytes(actual), as_bytes(expected))


@pytest.mark.parametrize("geometry, layers", [(MODEL, 1), ((2048, 4, 320), 1), (SMALL, 4)], ids=str)
@torch.no_grad()
def test_logits_and_greedy_tokens_are_the_unpatched_models(device, geometry, layers):
    model, ids = tiny(geometry, device, layers=layers), prompt(device)
    plain = [greedy(model, ids), greedy(model, ids, cache_implementation="static")]
    # Over all that was generated at once, so that later tokens count too.
    sequence = torch.cat([ids, plain[0]], 1)
    logits = model(sequence).logits
    patch(model)
    distance = (model(sequence).logits - logits).abs().max()
    assert 0 < distance <= LOGITS * logits.abs().max()
    assert torch.equal(greedy(model, ids), plain[0])
    assert torch.equal(greedy(model, ids, cache_implementation="static"), plain[1])


@torch.no_grad()
def test_a_batch_with_padding(device):
    model, ids = tiny(SMALL, device), prompt(device, batch=3)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, :2] = 0
    plain = greedy(model, ids, 64, attention_mask=mask)
    assert torch.equal(greedy(patch(model), ids, 64, attention_mask=mask), plain)
    with torch.inference_mode():
        assert torch.equal(greedy(model, ids, 64, attention_mask=mask), plain)


@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_every_write_is_folded(monkeypatch, layers):
    model, ids = patch(tiny(layers=layers)), prompt()
    calls = reads_of(monkeypatch)
    model(ids)
    assert calls == [(12, False)] + [(12, True)] * (2 * layers)
    calls.clear()
    model(ids, output_hidden_states=True)
    greedy(model, ids, 2)
    assert calls == 2 * ([(12, False)] + [(12, True)] * (2 * layers)) + [(1, False)] + [(1, True)] * (2 * layers)


@torch.no_grad()
def test_whoever_looks_at_the_streams_finds_them(device):
    model, ids = tiny(SMALL, device, layers=3), prompt(device)
    expected = model(ids, output_hidden_states=True).hidden_states
    model = patch(model)
    unwatched = model(ids).logits
    seen = model(ids, output_hidden_states=True).hidden_states
    assert len(seen) == len(expected)
    for look in [
        lambda t: t + 0,
        lambda t: t.cpu().numpy(),
        lambda t: torch.stack([t]),
        lambda t: copy.deepcopy(t),
        lambda t: t[..., 1:].exp(),
        lambda t: torch.utils._pytree.tree_map(torch.clone, [t])[0],
        lambda t: torch.empty_like(t).copy_(t),
        lambda t: t.view(t.shape[0], -1).tolist(),
        lambda t: torch.tensor(t.tolist()),
        lambda t: stored(t),
        lambda t: below_python(t),
    ]:
        # As written by the layer of the unpatched model out of its read, which is a little different.
        for waiting, plain in zip(seen, expected, strict=True):
            looked, wanted = (torch.as_tensor(look(t)).cpu() for t in (waiting, plain))
            assert (looked - wanted).abs().max() <= 2.0**-18 * wanted.abs().max() and looked.shape == wanted.shape
    assert all(t.dtype == torch.float32 and t.device == ids.device and "tensor(" in repr(t) for t in seen)

    changed = []

    def hook(module, args, output):
        changed.append(output.clone())
        output.mul_(1)

    for layer in model.model.layers:
        layer.register_forward_hook(hook)
    watched = model(ids).logits
    assert len(changed) == 3 and (watched - unwatched).abs().max() <= LOGITS * unwatched.abs().max()

    def negate(module, args, output):
        output.mul_(-1)  # and returns nothing

    model.model.layers[1].register_forward_hook(negate)
    assert (model(ids).logits - unwatched).abs().max() > 0.1 * unwatched.abs().max(), "a change in place is not lost"


def below_python(tensor):
    """As code in C++ sees it."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor + 0


def stored(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


@torch.no_grad()
def test_layers_that_read_the_streams_themselves(device, monkeypatch):
    """n-gram embeddings: such a layer adds to the streams before its first read."""
    ngrams = {"ple_layer_ids": [2], "ngram_vocab_size_base": 64, "split_ngram_parts": 1, "eos_token_id": 0}
    model, ids = tiny(SMALL, device, layers=4, **ngrams), prompt(device)
    torch.nn.init.normal_(model.model.layers[1].ple.conv1d.weight)
    logits, tokens = model(ids).logits, greedy(model, ids, 32, eos_token_id=None)
    calls = reads_of(monkeypatch)
    assert (patch(model)(ids).logits - logits).abs().max() <= LOGITS * logits.abs().max()
    assert [folded for _, folded in calls] == [False, True, False, True] + [True] * 5
    assert torch.equal(greedy(model, ids, 32, eos_token_id=None), tokens)


@torch.no_grad()
def test_prefill_by_the_library(device, monkeypatch):
    """Exactly Transformers' own for more than 8 tokens; the op for 8 and fewer."""
    model, ids = tiny(SMALL, device), prompt(device)
    logits, tokens = model(ids).logits, greedy(model, ids, 32)
    calls = reads_of(monkeypatch)
    same(patch(model, prefill="library")(ids).logits, logits)
    assert not calls
    model(ids[:, :8])
    assert [count for count, _ in calls] == [8] * 5
    assert torch.equal(greedy(model, ids, 32), tokens)
    patch(unpatch(model)).model.hyper_connection_mixer.prefill = "library"
    assert 0 < (model(ids).logits - logits).abs().max() <= LOGITS * logits.abs().max(), "it finds the write landed"


@torch.no_grad()
def test_a_prefix_does_not_depend_on_what_follows_in_the_read():
    """What prefill="exact" is for: the read of a token is the same bits alone and among others."""
    model, ids = patch(tiny()), prompt()
    inputs = []
    module = model.model.layers[0].attn_hyper_connection
    module.register_forward_hook(lambda module, args, output: inputs.append((args[0], output[0])))
    model(ids)
    (streams, mixed), one_by_one = inputs[0], []
    for i in range(12):
        one_by_one.append(module(streams[:, i : i + 1])[0])
    same(torch.cat(one_by_one, 1), mixed)


def test_gradients_are_transformers_own(device):
    model, ids = tiny(SMALL, device), prompt(device)
    gradients = []
    for patched in (False, True):
        model = patch(model) if patched else model
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in model.parameters() if weight.grad is not None])
    for expected, actual in zip(*gradients, strict=True):
        if device == "cpu":
            same(actual, expected)
        else:  # where the experts' backward pass adds in no fixed order
            assert (actual - expected).abs().max() <= 2.0**-14 * expected.abs().max()


def test_frozen_hyper_connections_beside_trained_blocks(device, monkeypatch):
    """The first reads want no gradient, so the op reads them; the streams that it wrote to want one from there on."""
    model, ids = tiny(SMALL, device), prompt(device)
    model.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    gradients, calls = [], reads_of(monkeypatch)
    for patched in (False, True):
        model = patch(model) if patched else model
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([w.grad for w in model.parameters() if w.requires_grad])
    assert calls == [(12, False), (12, False)]
    for expected, actual in zip(*gradients, strict=True):
        assert (actual - expected).abs().max() <= 2.0**-14 * expected.abs().max()


@torch.no_grad()
def test_there_and_back(device):
    model, ids = tiny(SMALL, device), prompt(device)
    before = dict(model.named_modules())
    logits, state = model(ids).logits, model.state_dict()
    seen = []
    model.model.hyper_connection_mixer.register_forward_hook(lambda module, args, output: seen.append(output))
    assert patch(model) is model
    patched = {name: module for name, module in model.named_modules() if before.get(name) is not module}
    assert len(patched) == 5 and all(isinstance(m, strata_ops.nn.GatedResidual) for m in patched.values())
    assert "PatchedGatedResidual(" in str(model) and not model.model.hyper_connection_mixer.training
    assert list(model.state_dict()) == list(state)
    assert all(w.data_ptr() == state[name].data_ptr() for name, w in model.state_dict().items())
    model(ids)
    moved = copy.deepcopy(model).train().to(torch.bfloat16)
    assert unpatch(model) is model and dict(model.named_modules()) == before
    same(model(ids).logits, logits)
    mixer = unpatch(moved).model.hyper_connection_mixer
    assert type(mixer) is Qwen4ExpTextGatedResidual and mixer.training and mixer.hc_norm.weight.dtype == torch.bfloat16
    assert len(seen) == 2, "the hook went along"
    copied = copy.deepcopy(patch(model))
    same(copied(ids).logits, model(ids).logits)
    same(unpatch(copied)(ids).logits, logits)


@torch.no_grad()
def test_weights_that_bf16_does_not_hold(device):
    model, ids = tiny(SMALL, device), prompt(device)
    weight = model.model.layers[1].mlp_hyper_connection.input_mix_weight_up.weight
    weight[3, 4] = 1 + 2.0**-12
    before = dict(model.named_modules())
    name = r"'model\.layers\.1\.mlp_hyper_connection'"
    with pytest.raises(RuntimeError, match=rf"^patch: {name}: .*'input_mix_weight_up\.weight'.*round_weights=True.*$"):
        patch(model)
    assert dict(model.named_modules()) == before, "nothing was swapped"
    logits = patch(model, round_weights=True)(ids).logits
    assert weight[3, 4] != 1
    weight[3, 4] = 1
    same(model(ids).logits, logits)


def test_refusals():
    with pytest.raises(RuntimeError, match=r"^patch: Linear \(model_type None\) has no gated residual to swap"):
        patch(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"^unpatch: Linear .* is not patched$"):
        unpatch(torch.nn.Linear(2, 2))
    model = tiny()
    with pytest.raises(RuntimeError, match=r"^unpatch: Qwen4ExpForCausalLM .*'qwen4_exp_text'.* is not patched$"):
        unpatch(model)
    with pytest.raises(RuntimeError, match=r"^patch: Qwen4ExpForCausalLM \(patched already, "):
        patch(patch(model))
    with pytest.raises(RuntimeError, match="prefill is 'fast'"):
        patch(unpatch(model), prefill="fast")
    with pytest.raises(RuntimeError, match=r"'input_mix_weight_down\.weight' is on the meta device; load the weights"):
        patch(tiny(device="meta"))
    mixer = model.model.hyper_connection_mixer
    mixer._hf_hook = object()
    with pytest.raises(RuntimeError, match=r"'model\.hyper_connection_mixer' is moved about by accelerate"):
        patch(model)
    del mixer._hf_hook
    model.model.layers[0].attn_hyper_connection.block_inject_weight.register_parameter("weight", None)
    with pytest.raises(RuntimeError, match=r"^patch: 'model\.layers\.0\.attn_hyper_connection': .*NoneType"):
        patch(model)
    assert type(mixer) is Qwen4ExpTextGatedResidual and model.model.hyper_connection_mixer is mixer


@torch.no_grad()
def test_compiled_whole(device):
    """The write is not deferred then: the compiler sees plain tensors, and fuses it with what is around."""
    model, ids = tiny(SMALL, device, layers=1), prompt(device)
    expected = patch(model)(ids).logits
    compiled = torch.compile(model.model.layers[0].mlp_hyper_connection, backend="aot_eager", fullgraph=True)
    streams = torch.randn(1, 3, 288, device=device)
    for actual, wanted in zip(compiled(streams), model.model.layers[0].mlp_hyper_connection(streams), strict=True):
        same(actual, wanted + 0)
    logits = torch.compile(model, backend="eager")(ids).logits
    assert (logits - expected).abs().max() <= LOGITS * expected.abs().max()


# ----------------------------------------------------------------------------------------------------------------------
# bf16, and every variant


@pytest.mark.parametrize("geometry", [MODEL, SMALL], ids=str)
@torch.no_grad()
def test_bfloat16_is_nearer_to_float64(device, geometry, record_property):
    """The logits of both models over one sequence, and the first step at which what they write differs.

    The judge is the model in float64 (whose norms Transformers takes in float32, far below bf16's rounding). All
    experts and all positions are used: where they are chosen by rank, one changed choice hides all rounding.
    """
    smooth = {"num_experts": 2, "num_experts_per_tok": 2, "indexer_budget": 1024}
    model, ids = tiny(geometry, device, torch.bfloat16, **smooth), prompt(device)
    judge = tiny(geometry, device, torch.float64, **smooth)
    judge.set_experts_implementation("eager")  # the others have no float64
    judge.load_state_dict(model.state_dict())
    plain = greedy(model, ids, 64)
    sequence = torch.cat([ids, plain], 1)
    truth, theirs = judge(sequence).logits, model(sequence).logits.double()
    patched = greedy(patch(model), ids, 64)
    ours = model(sequence).logits.double()
    differing = (patched != plain).any(0).nonzero()
    error, of_theirs = ((logits - truth).abs().mean().item() for logits in (ours, theirs))
    record_property("first differing step", differing[0].item() + 1 if len(differing) else None)
    record_property("mean distance of the logits to float64, patched and unpatched", (error, of_theirs))
    assert error < of_theirs
    assert (ours - theirs).abs().max() <= 2 * (theirs - truth).abs().max()


VARIANTS = """
import sys, torch
from strata_ops import info
from strata_ops.integrations.transformers import patch
from test_transformers import greedy, prompt, tiny
device, geometry = sys.argv[1], eval(sys.argv[2])
model = patch(tiny(geometry, device))
ids = prompt(device)
torch.set_num_threads(1)
with torch.no_grad():
    tokens = greedy(model, ids, int(sys.argv[3]))
    logits = model(torch.cat([ids, tokens], 1)).logits
chosen = [d.get("chosen") for b in info()["backends"] if b["name"] != "cpu" for d in b.get("devices", [])]
print(tokens.tolist(), logits.cpu().view(torch.int32).sum().item(), "|", chosen if device == "cuda" else "cpu")
"""


def test_generate_is_the_same_bytes_under_every_variant(device):
    """STRATA_HC_SPLIT is read once in a process, so there are several, at once. The CPU never reads it."""
    geometry, steps = (MODEL, 256) if device == "cuda" else (SMALL, 32)
    values = (None, "0", "1", "2", "7") if device == "cuda" else (None, "0", "7")
    environment = {k: v for k, v in os.environ.items() if k != "STRATA_HC_SPLIT"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    running = {
        value: subprocess.Popen(
            [sys.executable, "-c", VARIANTS, device, str(geometry), str(steps)],
            env=environment if value is None else {**environment, "STRATA_HC_SPLIT": value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for value in values
    }
    said = {}
    for value, process in running.items():
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        said[value] = out.strip().split("|")
    assert len({results for results, _ in said.values()}) == 1, said
    if device == "cuda":
        assert ["plain" in said["0"][1], "split" in said["1"][1], "staged" in said["2"][1]] == [True] * 3, said


@needs_cards
@torch.no_grad()
def test_generate_on_a_simulated_card(monkeypatch):
    """The variants that need a card, P4 too, read a model's tokens on one that is simulated: the CPU's bytes."""
    model, ids = patch(tiny(MODEL, layers=1)), prompt(tokens=2)
    logits = model(ids).logits
    for variant in debug.variants(card="gfx1201"):
        if variant == "runtime_geometry":
            continue

        def read(*args, variant=variant, **options):
            return debug.fused_gr_read(*args, variant=variant, card="gfx1201", **options)

        with monkeypatch.context() as patched:
            patched.setattr(strata_ops.nn, "fused_gr_read", read)
            same(model(ids).logits, logits)


def test_devices_are_what_is_here():
    """So that a run on a card is one: everything above that takes `device` ran there."""
    assert ("cuda" in devices()) == torch.cuda.is_available()
