"""`python -m strata_ops doctor`: what it tells a person and a program, and what it finds wrong."""

import json
import re

import pytest
import torch

from strata_ops import _core, _libraries, doctor, info
from strata_ops.__main__ import main
from strata_ops.info import render as render_info
from test_layers import ROOT, project_files
from test_process import command

OURS = dict.fromkeys(doctor.VARIABLES)


@pytest.fixture
def unset(monkeypatch):
    """The environment without variables of ours."""
    for name in (*OURS, _core.ARCH_OVERRIDE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def told(report, level):
    return [(finding["what"], finding["do"]) for finding in report["findings"] if finding["level"] == level]


def test_as_a_command():
    done = command("doctor", STRATA_HC_SPLIT="2")
    assert done.returncode == 0 and done.stdout.endswith("\nnothing is wrong\n"), done.stdout
    assert "P4 on cpu: no, it is a GPU's kernel" in done.stdout and done.stderr == ""


def test_json_and_status(unset, capsys):
    unset.setenv("STRATA_HC_SPLIT", "2")
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert set(report) == {"ok", "findings", "devices", "environment", "installed", "info"}
    assert report["environment"] == [
        {"name": "STRATA_HC_SPLIT", "text": "2", "what": doctor.VARIABLES["STRATA_HC_SPLIT"]}
    ]
    assert report["installed"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert report["info"] == json.loads(json.dumps(info()))
    cpu = report["devices"][0]
    assert cpu["device"] == "cpu" and cpu["runs"] == report["info"]["backends"][0]["devices"][0]["chosen"]
    assert cpu["p4"] == {"runs": False, "why_not": "it is a GPU's kernel", "do": None}
    unset.setenv("STRATA_HC_SPLIT", "")
    unset.setenv("STRATA_HC_SPLTI", "7")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and len(told(report, "problem")) == 2


def test_for_people(unset, capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert render_info(info()) in text, "the facts are info's"
    unset.setenv("STRATA_SELFTETS", "0")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert text.endswith("\n1 problem, see above\n")
    assert "problem: STRATA_SELFTETS is set, but there is no such variable; set STRATA_SELFTEST if" in text


@pytest.mark.parametrize(
    ("name", "text", "level", "what", "do"),
    [
        ("STRATA_HC_SPLIT", "70", "problem", "STRATA_HC_SPLIT='70' names no variant, so staged runs", "0 (plain)"),
        ("STRATA_HC_SPLIT", "", "problem", "STRATA_HC_SPLIT='' names no variant", "7 (P4)"),
        ("STRATA_HC_SPILT", "7", "problem", "there is no such variable", "set STRATA_HC_SPLIT"),
        ("STRATA_QFUSE_HV", "1", "problem", "there is no such variable", "set STRATA_QFUSE_HC"),
        ("STRATA_XYZZY", "1", "problem", "there is no such variable", "unset it; there are STRATA_HC_SPLIT,"),
        ("STRATA_QFUSE_HC", "yes", "problem", "STRATA_QFUSE_HC='yes' has no effect", "0 or 1"),
        ("STRATA_SELFTEST", "off", "problem", "STRATA_SELFTEST='off' has no effect", "0 or 1"),
        ("STRATA_SELFTEST", "0", "note", "nothing checks", "unset STRATA_SELFTEST"),
        ("HSA_OVERRIDE_GFX_VERSION", "12.0.1", "note", "may not be what it is", None),
    ],
)
def test_variables(unset, name, text, level, what, do):
    unset.setenv(name, text)
    report = doctor.doctor()
    found = [f for f in told(report, level) if name in f[0]]
    assert len(found) == 1 and what in found[0][0], report["findings"]
    assert found[0][1] is None if do is None else do in found[0][1]
    assert report["ok"] == (level == "note")
    assert found[0][0] in doctor.render(report)


def test_values_that_are_right(unset):
    for name, text in (("STRATA_HC_SPLIT", "7"), ("STRATA_QFUSE_HC", "0"), ("STRATA_SELFTEST", "1")):
        unset.setenv(name, text)
    assert doctor.doctor()["findings"] == []


def test_the_list_of_variables_is_whole():
    """Every variable of ours that a file of the project reads."""
    read = re.compile(r"(?:environ(?:\.get)?[\[(]\s*|getenv\(\s*)[\"'](STRATA_\w+)")
    assigned = re.compile(r"^(?:export )?(STRATA_\w+)(?: \?=|$)", re.MULTILINE)
    found = {_core.SELECTOR_VARIABLE, _core.Q8_FUSE_VARIABLE, _core.SELFTEST_VARIABLE}
    for name in project_files():
        if name.endswith((".py", ".cpp", ".hpp", ".cu", ".cuh")):
            found.update(read.findall((ROOT / name).read_text()))
        elif name == "Makefile":
            found.update(assigned.findall((ROOT / name).read_text()))
    assert found == set(OURS)


GATES = {gate: True for gate in ("plain", "split", "staged", "wide_up", "runtime_geometry", "tiled", "p4")}
GATES |= {"state": "completed"}


def gpu(arch="gfx1201", want="staged", chosen="staged", why="reasons", **gates):
    """A GPU's facts, as `info` has them."""
    return {"index": 0, "arch": arch, "want": want, "chosen": chosen, "why": why, "gates": {**GATES, **gates}}


@pytest.mark.parametrize(
    ("facts", "why_not", "do"),
    [
        (gpu(want="p4", chosen="p4"), None, None),
        (gpu(), "nobody asked for it", "set STRATA_HC_SPLIT=7 before"),
        (gpu(arch="gfx1200:sramecc-:xnack-"), "nobody asked for it", "set STRATA_HC_SPLIT=7 before"),
        (gpu(arch="sm_90", want="p4"), "it is for gfx1200 and gfx1201, and this is sm_90", None),
        (gpu(arch="gfx942"), "it is for gfx1200 and gfx1201, and this is gfx942", None),
        (gpu(want="p4", p4=False), "reasons", None),
        (gpu(want="p4", state="skipped"), "reasons", "unset STRATA_SELFTEST"),
        (gpu(want="p4", state="not run"), "reasons", "let the self-test run"),
        (gpu(want="p4", state="not completed"), "reasons", "let the self-test run"),
    ],
)
def test_why_not_p4(facts, why_not, do):
    p4 = doctor._p4("cuda:0", facts)
    assert (p4["runs"], p4["why_not"]) == (why_not is None, why_not)
    assert p4["do"] is None if do is None else p4["do"].startswith(do)


@pytest.mark.parametrize(
    ("facts", "reason", "problem"),
    [
        (gpu(), None, None),
        (gpu(state="not run"), None, None),
        (gpu(state="skipped"), None, None),
        (gpu(p4=False), None, None),
        (gpu(state="not completed"), "out of memory", "cuda:0: the self-test did not complete: out of memory"),
        (gpu(plain=False), None, "cuda:0 is not used: reasons"),
        (gpu(staged=False, chosen="split"), None, "cuda:0: the self-test found staged wrong; split runs"),
        ({"index": 0, "error": "it fell off"}, "it fell off", "cuda:0 cannot be used: it fell off"),
    ],
)
def test_devices(facts, reason, problem):
    found = doctor._judge_device("cuda:0", facts, reason)
    assert [f["what"] for f in found] == ([] if problem is None else [problem])


def test_a_torch_for_gpus_without_our_library(unset):
    """As on a machine whose torch was exchanged for a CUDA build after strata_ops was built."""
    missing = _libraries.LIBRARIES["cuda"]._replace(loaded=False, reason="libstrata_cuda.so was not built")
    unset.setitem(_libraries.LIBRARIES, "cuda", missing)
    unset.setattr(torch.version, "cuda", "13.0")
    report = doctor.doctor()
    ((what, do),) = told(report, "problem")
    assert "libstrata_cuda.so was not built" in what and "--no-build-isolation" in do


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this torch uses GPUs")
def test_a_card_that_torch_does_not_see(unset, tmp_path):
    unset.setitem(doctor._DRIVERS, "CUDA", str(tmp_path))
    report = doctor.doctor()
    assert report["ok"] and ("torch is a CPU build" in told(report, "note")[0][0])


def test_a_simulated_card(unset):
    try:
        expected = info("gfx1201")
    except RuntimeError:
        pytest.skip("left out: the simulated cards were not built")
    report = doctor.doctor("gfx1201")
    assert report["info"] == expected and report["ok"]
    (card,) = report["devices"]
    assert card["p4"]["do"] == "set STRATA_HC_SPLIT=7 before the process starts"
