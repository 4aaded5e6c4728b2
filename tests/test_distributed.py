"""Several processes: DTensors, and the data-parallel example. CPU and gloo."""

import re
from pathlib import Path

import pytest
import torch.distributed

from test_process import python

HERE = Path(__file__).parent
EXAMPLE = str(HERE.parent / "examples" / "data_parallel.py")
QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)


def test_two_processes_share_the_tokens():
    done = python(str(HERE / "sharded_reads.py"), **QUIET)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = "bytes, replicated, second dimension, redistributed, gradients, compiled, refusals\n"
    assert done.stdout == expected, done.stderr[-3000:]


def test_example_of_data_parallel_training():
    """Two processes find the losses that one does."""
    alone = python(EXAMPLE, **QUIET)
    together = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE, **QUIET)
    losses = []
    for done in (alone, together):
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append([float(text) for text in re.findall(r"^step \d: loss ([\d.]+)$", done.stdout, re.MULTILINE)])
    assert len(losses[0]) == 5 and losses[0][-1] < losses[0][0] / 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
