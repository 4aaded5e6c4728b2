"""The examples run, and say what they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import need_transformers

ROOT = Path(__file__).resolve().parent.parent


def run(name, *arguments):
    if name == "patch_transformers.py":
        need_transformers()
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_decode_loop(device):
    said = run("decode_loop.py", "--device", device, "--reads", "2", "--tokens", "8")
    assert "plain loop:" in said
    assert ("all 8 tokens are equal" if device == "cuda" else "no CUDA graph on the CPU") in said


def test_patch_transformers(device):
    said = run("patch_transformers.py", "--device", device, "--tokens", "8")
    assert "all 8 tokens are equal" in said and "patched" in said


def test_speculative(device):
    """More than one token a pass, or nothing was speculated."""
    said = run("speculative.py", "--device", device, "--reads", "3", "--tokens", "16")
    assert "all are plain decoding's" in said
    assert float(said.split(" a pass")[0].split()[-1]) > 1


def test_the_toy_model_does_nothing_by_itself():
    assert run("toy.py") == ""


def test_every_example_is_run_by_a_test():
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    names = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert len(names) >= 4 and all(f'"{name}"' in sources for name in names)


@pytest.mark.parametrize("name", ["decode_loop.py", "patch_transformers.py", "speculative.py"])
def test_help(name):
    """Without a run: it is the docstring and the options, and every command in it names the file."""
    source = (ROOT / "examples" / name).read_text()
    assert "parse_args()" in source and f"\n  python examples/{name}" in source
