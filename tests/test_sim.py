"""The simulated cards as Python sees them. The kernels on them, the detectors and the runtime: tests/cpp/sim_*.cpp."""

import ctypes
import functools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import strata_ops
from strata_ops import _core, cards, debug, parity
from support import MODEL, SMALL, assert_same, case, cut, make_inputs
from test_process import python

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["gfx1200", "gfx1201", "gfx1100", "gfx942", "gfx90a", "sm_75", "sm_90", "sm_120"]

built = (cards.FOLDER / "libstrata_sim.so").exists()
needs_cards = pytest.mark.skipif(
    not built and not os.environ.get("STRATA_REQUIRE_ALL"), reason="built without Boost.Context"
)


def test_a_build_without_cards_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "FOLDER", tmp_path)
    cards._library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"^the simulated cards were left out.*install it .*boost-context"):
            cards.names()
    finally:
        cards._library.cache_clear()


@needs_cards
def test_profiles():
    assert cards.names() == NAMES
    for name in NAMES:
        facts = cards.open_card(name).describe()
        assert facts["arch"] == name
        assert facts["wave_width"] == (64 if name in ("gfx942", "gfx90a") else 32)
        assert facts["shared_bytes"] // 1024 == {"sm_90": 227, "sm_120": 99}.get(name, 64)
        assert facts["compute_units"] > 0
        assert facts["chosen"] == "staged"
    facts = cards.open_card("gfx950,64,163840,256").describe()
    assert (facts["arch"], facts["wave_width"], facts["shared_bytes"]) == ("gfx950", 64, 163840)
    assert facts["compute_units"] == 256
    for wrong in ("gfx", "gfx1201,32", "x,16,65536,1", "x,32,1,1", "x,32,65536,0", "x,32,65536,1,1"):
        with pytest.raises(RuntimeError, match="simulated card"):
            cards.open_card(wrong)


@needs_cards
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("card", ["gfx1201", "gfx942", "sm_90"])
def test_reads_are_the_contracts(card, strict):
    for fold, inject, q8_1, tokens in [(True, True, True, 9), (False, False, False, 2), (True, False, True, 0)]:
        inputs, exact = case(SMALL, fold)
        inputs = inputs.tokens(slice(tokens)).ask(fold=fold, inject=inject)
        for seed in (0, 1, 2**64 - 1):
            read = debug.fused_gr_read(
                *inputs, q8_1=q8_1, variant="runtime_geometry", card=card, seed=seed, strict=strict
            )
            assert_same(read, cut(exact, slice(tokens), inject=inject, q8_1=q8_1), f"{card} {seed}")
    inputs, exact = case(SMALL, bf16=True)
    read = debug.fused_gr_read(*inputs, q8_1=True, variant="runtime_geometry", card=card, strict=strict)
    assert_same(read, exact, f"{card}, bf16 streams")


@needs_cards
def test_reads_at_the_models_geometry():
    inputs = make_inputs(MODEL, 2)
    expected = strata_ops.fused_gr_read(*inputs, q8_1=True)
    for card in ("gfx1201", "gfx942"):
        for variant in debug.variants(card=card):
            for columns in (16, 32):
                read = debug.fused_gr_read(*inputs, q8_1=True, variant=variant, q8_columns=columns, card=card)
                assert_same(read, expected, f"{card} {variant}")
    bf16 = inputs.bf16_streams()
    for variant in ("plain", "split"):  # the two norms
        read = debug.fused_gr_read(*bf16, q8_1=True, variant=variant, card="gfx1201", strict=True)
        assert_same(read, strata_ops.fused_gr_read(*bf16, q8_1=True), f"{variant}, bf16 streams")
    assert_same(debug.fused_gr_read(*inputs, q8_1=True, variant="p4", card="gfx1201", strict=True), expected)


@needs_cards
def test_inputs_as_the_op_takes_them():
    """Leading dimensions, strided activations; the op's own refusals."""
    inputs = make_inputs(SMALL, 6)
    expected = strata_ops.fused_gr_read(*inputs)
    batch = inputs._replace(
        residual=inputs.residual.unflatten(0, (2, 3)),
        block_out=inputs.block_out.unflatten(0, (2, 3)).mT.contiguous().mT,
        inject_prev=inputs.inject_prev.unflatten(0, (2, 3)),
    )
    read = debug.fused_gr_read(*batch, variant="runtime_geometry", card="gfx90a")
    assert read.mixed.shape == (2, 3, SMALL[0])
    assert torch.equal(read.mixed.flatten(0, 1), expected.mixed)
    wrong_type = inputs._replace(w_down=inputs.w_down.float())
    with pytest.raises(RuntimeError, match="'w_down'"):
        debug.fused_gr_read(*wrong_type, variant="runtime_geometry", card="gfx90a")
    elsewhere = inputs._replace(residual=inputs.residual.to("meta"))
    with pytest.raises(RuntimeError, match="'residual' is on meta"):
        debug.fused_gr_read(*elsewhere, variant="runtime_geometry", card="gfx90a")
    with pytest.raises(RuntimeError, match=r"^fused_gr_read: there is no variant 'p5'"):
        debug.fused_gr_read(*inputs, variant="p5", card="gfx90a")


@needs_cards
def test_a_failing_launch_raises_and_the_next_read_has_a_fresh_card():
    inputs = make_inputs(SMALL, 2)
    expected = strata_ops.fused_gr_read(*inputs)
    c = ctypes.CDLL(str(cards.FOLDER / "libstrata_sim.so"))
    for card, name in (("gfx942", "hipErrorLaunchFailure"), ("sm_90", "cudaErrorLaunchFailure")):
        read = functools.partial(cards.open_card(card).read, *inputs, variant="runtime_geometry")
        assert_same(read(), expected)
        c.strata_sim_plant(b"launch", ctypes.c_long(2), 719)
        with pytest.raises(RuntimeError, match=rf"^fused_gr_read: gr_down_runtime_kernel failed: {name} \(719\)"):
            read()
        assert_same(read(), expected)


@needs_cards
@pytest.mark.parametrize("strict", [False, True])
def test_parity(monkeypatch, strict):
    suites = [
        parity.Suite("small", parity.Geometry(*SMALL), (1, 8), True),
        parity.Suite("model", parity.MODEL, (2,), False),
    ]
    monkeypatch.setattr(parity, "SUITES", suites[:1] if strict else suites)
    result = parity.parity(card="gfx942", seed=5, strict=strict)
    assert all(row["equal"] == row["cases"] for row in result["variants"].values()), result
    assert (result["card"], result["seed"], result["strict"]) == ("gfx942", 5, strict)
    assert result["variants"]["runtime_geometry"]["cases"] == 24
    assert result["variants"]["p4"]["cases"] == (0 if strict else 12)
    assert result["ok"] is not strict  # what ran no case is not said to be equal
    assert "simulated gfx942" in parity.render(result)
    json.dumps(result)


@needs_cards
def test_commands():
    done = python("-m", "strata_ops", "info", "--card", "gfx942", "--json", STRATA_HC_SPLIT="7")
    assert done.returncode == 0, done.stderr
    (backend,) = json.loads(done.stdout)["backends"]
    (device,) = backend["devices"]
    assert (backend["name"], device["arch"], device["want"]) == ("sim", "gfx942", "p4")
    assert "64-lane waves" in python("-m", "strata_ops", "info", "--card", "gfx942").stdout
    for command in ("info", "parity"):
        done = python("-m", "strata_ops", command, "--card", "rtx")
        assert done.returncode == 2
        assert done.stderr.startswith("strata_ops: there is no simulated card 'rtx': name one of gfx1200")
        assert done.stderr.count("\n") == 1


@needs_cards
def test_the_libraries_show_no_sanitizer():
    for name in ("libstrata_sim.so", "libstrata_sim_strict.so"):
        shown = subprocess.run(
            ["nm", "-D", "--defined-only", cards.FOLDER / name], capture_output=True, text=True, check=True
        ).stdout
        symbols = {line.split()[-1] for line in shown.splitlines()}
        assert "strata_backend" in symbols
        assert all(s == "strata_backend" or s.startswith("strata_sim_") for s in symbols), symbols


def test_error_names_are_the_vendors():
    """csrc/sim's names are those that the vendor headers' static_asserts compare with the vendors' own."""
    table = (ROOT / "csrc/sim/error_names.hpp").read_text()
    rows = re.findall(r"\{(\d+), (nullptr|\"\w+\"), (nullptr|\"\w+\")\}", table)
    for vendor, column in (("cuda", 1), ("hip", 2)):
        header = (ROOT / f"csrc/gpu/vendor/{vendor}.hpp").read_text()
        theirs = {int(code): vendor + name for code, name in re.findall(r"STRATA_CODE\((\d+), (\w+)\)", header)}
        ours = {int(row[0]): row[column].strip('"') for row in rows if row[column] != "nullptr"}
        assert ours == theirs
        listed = {code for code in range(2000) if _core.fused_gr_error_class(code, vendor) != "unlisted"}
        assert listed <= ours.keys()
