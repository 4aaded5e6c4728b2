"""What needs a process of its own: forbidden memory, what an import does, the commands."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import runners

HERE = Path(__file__).parent


def python(*arguments, **environment):
    """A fresh Python that finds the same strata_ops, or PYTHONPATH's, and these tests. (Not in the root of the sources,
    where one that was built in place would be found before any other.)"""
    import strata_ops

    places = os.pathsep.join([str(Path(strata_ops.__file__).parents[1]), str(HERE)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": places, "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=HERE,
    )


def test_nothing_outside_is_touched():
    done = python(str(HERE / "guarded_read.py"))
    assert done.returncode == 0, done.stderr or signal.Signals(-done.returncode).name
    assert done.stdout == "nothing touched\n"


def test_the_guard_is_one():
    assert python(str(HERE / "guarded_read.py"), "--touch").returncode == -signal.SIGSEGV


def test_import_initialises_no_gpu():
    """Nor does a read on the CPU; and the package can be imported with no GPU in sight."""
    code = """
import torch, strata_ops
from support import SMALL, make_inputs
assert not torch.cuda.is_initialized()
strata_ops.fused_gr_read(*make_inputs(SMALL, 1))
assert not torch.cuda.is_initialized()
print(torch.cuda.is_available())
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    blind = python("-c", code, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert (blind.returncode, blind.stdout) == (0, "False\n"), blind.stderr


@pytest.mark.parametrize("before", ["the import", "a read"])
def test_fork(before):
    """A child of fork() reads and gets its parent's bytes, though the threads of torch's pool are gone."""
    code = f"""
import hashlib, os, signal
import torch, strata_ops
from support import MODEL, make_inputs
torch.set_num_threads(2)

def digest():
    read = strata_ops.fused_gr_read(*make_inputs(MODEL, 8) if inputs is None else inputs, q8_1=True)
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in read)).digest()  # torch's own copies may wait too

inputs = None
if {before == "a read"}:
    inputs = make_inputs(MODEL, 8)
    digest()
source, sink = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os.write(sink, digest())
    os._exit(0)
os.close(sink)
with open(source, "rb") as pipe:
    told = pipe.read()
assert os.waitpid(child, 0)[1] == 0, "the child came to no end"
assert told == digest()
print("equal")
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def command(*arguments, **environment):
    return python("-m", "strata_ops", *arguments, **environment)


def test_info_json():
    done = command("info", "--json", STRATA_HC_SPLIT="70")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    keys = {"strata_ops", "torch", "python", "arithmetic_version", "model_geometry", "selector", "backends"}
    assert keys <= set(report)
    assert report["torch"] == torch.__version__ and report["model_geometry"] == [2560, 4, 320]
    assert report["selector"]["variable"] == "STRATA_HC_SPLIT" and report["selector"]["text"] == "70"
    backends = {backend["name"]: backend for backend in report["backends"]}
    assert set(backends) == {"cpu", "cuda", "hip"}
    for backend in backends.values():
        assert backend["loaded"] == (backend["reason"] is None), "why a backend is not there"
    cpu = backends["cpu"]
    assert cpu["loaded"] and cpu["variants"] == [r.variant for r in runners() if r.device == "cpu"]
    assert cpu["variants"][0] == "portable" and len(cpu["devices"]) == 1
    assert cpu["devices"][0]["chosen"] == cpu["variants"][-1] and cpu["devices"][0]["why"]


def test_info_for_people():
    done = command("info")
    assert done.returncode == 0 and torch.__version__ in done.stdout and "portable" in done.stdout
    assert done.stderr == ""


def test_parity_json(device):
    done = command("parity", "--device", device, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"device", "ok", "variants"} and report["device"] == device and report["ok"] is True
    here = {r.variant for r in runners() if r.device == device} - {"portable"} or {"portable"}
    assert set(report["variants"]) == here
    for row in report["variants"].values():
        assert set(row) == {"cases", "equal", "first_difference"}
        assert row["cases"] == row["equal"] > 60 and row["first_difference"] is None


def test_parity_tells_a_difference():
    """Exit status 1, and where: a path is made to give other bits."""
    code = """
import sys, torch
from strata_ops import debug, parity, __main__
real = debug.fused_gr_read
def wrong(*args, variant, **options):
    read = real(*args, variant=variant, **options)
    if variant != "portable":
        read.mixed.view(torch.int32)[-1, 5] ^= 1
    return read
debug.fused_gr_read = wrong
sys.exit(__main__.main(["parity", "--json"]))
"""
    if len([r for r in runners() if r.device == "cpu"]) < 2:
        pytest.skip("the portable path is alone here")
    done = python("-c", code)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["ok"] is False, done.stderr
    for row in report["variants"].values():
        assert row["equal"] == 0 and row["first_difference"]["output"] == "mixed"
        assert row["first_difference"]["index"] == [0, 5]


@pytest.mark.parametrize(
    "arguments",
    [
        ["parity", "--device", "tpu0"],
        ["parity", "--device", "meta"],
        ["parity", "--device", "cuda:99"],
        ["demo", "--device", "nowhere"],
        ["inform"],
        [],
        ["info", "--yaml"],
    ],
    ids=" ".join,
)
def test_errors_are_one_line(arguments):
    done = command(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.endswith("\n"), done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr) > 20


def test_output_that_nobody_reads():
    """`| head -1` ends it without a word."""
    code = f"{sys.executable} -m strata_ops info | head -1"
    import strata_ops

    environment = {**os.environ, "PYTHONPATH": str(Path(strata_ops.__file__).parents[1])}
    done = subprocess.run(code, shell=True, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout.count("\n") == 1
