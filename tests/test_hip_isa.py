"""A small part of tests/isa/parity.py: whole reads by the compiled AMD code on an instruction emulator, against the
CPU's bytes. Needs tinygrad's source tree (STRATA_TINYGRAD), whose emulator is in no package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_hip import have

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/isa"))
import codegen  # noqa: E402

SCRIPT = """
import os, sys
sys.path[:0] = {path!r}
import parity
from card import Card
card = Card({arch!r}, {compiler!r})
for variant, case in {cases}:
    trouble = parity.check(card, variant, parity.Case(**case))
    assert trouble is None, trouble
print(card.executed, "instructions")
"""


@pytest.mark.parametrize("compiler", codegen.COMPILERS)
@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_reads_have_the_cpu_bytes(arch, compiler):
    if not os.environ.get("STRATA_TINYGRAD"):
        pytest.skip("STRATA_TINYGRAD does not name tinygrad's source tree, whose emulator runs the instructions")
    have(codegen.hip)
    if compiler == "llvm24":
        have(codegen.triton_package)
    small = [
        ("p4", {"tokens": 2}),
        ("staged", {"tokens": 2, "q8_columns": 32}),
        ("plain", {"tokens": 1, "fold": False}),
        ("split", {"tokens": 1, "inject": False, "q8_columns": 0}),
        ("split", {"tokens": 1, "inject": False, "q8_columns": 0, "bf16": True}),
        ("runtime_geometry", {"tokens": 2, "geometry": (96, 3, 24)}),
    ]
    # In a process of its own: tinygrad's tests are a package called `test`.
    script = SCRIPT.format(path=[str(ROOT / "tests/isa")], arch=arch, compiler=compiler, cases=small)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-2]) > 100_000
