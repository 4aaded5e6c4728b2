"""What torch makes programs of: Inductor, CUDA graphs, AOTInductor from Python and from C++. Its bytes are eager's.

Frames, functionalisation and export without a compiler are in test_op.py, gradients in test_autograd.py.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import strata_ops
from strata_ops._libraries import LIBRARIES
from strata_ops.reference import read_eager
from support import MODEL, SMALL, as_bytes, make_inputs

op = torch.ops.strata
TORCH = Path(torch.__file__).parent


@pytest.fixture(scope="module")
def compiler():
    """Inductor needs one on the CPU, and the C++ program does."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not found:
        assert not os.environ.get("STRATA_REQUIRE_ALL"), "no C++ compiler"
        pytest.skip("left out: no C++ compiler")
    return found


def assert_equal_bytes(actual, expected, what=""):
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a.shape, a.dtype) == (e.shape, e.dtype), f"{what} {position}"
        assert torch.equal(as_bytes(a), as_bytes(e)), f"{what} {position}"


def two_reads(stream, residual, *rest):
    """Written in place: an argument of the graph, and a value inside it that is read before and after."""
    first = strata_ops.fused_gr_read_(stream, *rest, q8_1=True)
    inside = residual * 2
    before = inside + 1
    strata_ops.fused_gr_read_(inside, *rest)
    second = strata_ops.fused_gr_read(inside, *rest[:4], first.mixed, first.inject)
    return [t for t in (*first, before, inside, *second, second.mixed + 1) if t is not None]


def test_inductor(device, compiler):
    """Functional and in place, in one frame for all numbers of tokens from 2 on."""
    torch._dynamo.reset()
    frames = CompileCounterWithBackend("inductor")
    compiled = torch.compile(two_reads, fullgraph=True, dynamic=True, backend=frames)
    for tokens in (2, 3, 8, 9):
        inputs = make_inputs(SMALL, tokens).map(lambda t: t.to(device))
        stream, expected_stream = inputs.residual + 1, inputs.residual + 1
        actual = compiled(stream, *inputs)
        assert_equal_bytes(actual, two_reads(expected_stream, *inputs), f"T={tokens}")
        assert_equal_bytes([stream], [expected_stream], f"T={tokens} in place")
    assert frames.frame_count == 1


def test_inductor_with_gradients(device, compiler):
    """Inductor's fused backward pass sums in another order than eager's; the read itself is the op's."""
    torch._dynamo.reset()
    frames = CompileCounterWithBackend("inductor")
    compiled = torch.compile(strata_ops.fused_gr_read, fullgraph=True, dynamic=True, backend=frames)
    for tokens in (2, 5):
        results = []
        for read in (strata_ops.fused_gr_read, compiled):
            inputs = make_inputs(SMALL, tokens).map(lambda t: t.to(device).requires_grad_())
            outputs = [t for t in read(*inputs) if t is not None]
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
            results.append((outputs, inputs.map(lambda t: t.grad)))
        (plain, plain_gradients), (ours, our_gradients) = results
        assert_equal_bytes(ours, plain, f"T={tokens}")
        for name, p, o in zip(plain_gradients._fields, plain_gradients, our_gradients):
            relative = 2.0**-7 if p.dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(o, p, rtol=relative, atol=1e-5), f"T={tokens} {name}"
    assert frames.frame_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use: CUDA graphs are for those")
def test_reduce_overhead():
    """mode="reduce-overhead" records CUDA graphs, skips none, and replays with other inputs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def read(residual, *rest):
        stream = residual * 1
        first = strata_ops.fused_gr_read_(stream, *rest, q8_1=True)
        second = strata_ops.fused_gr_read(stream, *rest[:4], first.mixed, first.inject)
        return [t for t in (*first, stream, *second) if t is not None]

    compiled = torch.compile(read, fullgraph=True, mode="reduce-overhead")
    everything = make_inputs(MODEL, 10).map(lambda t: t.cuda())
    for call in range(5):  # from the third on, replayed
        inputs = everything.tokens(slice(2 * call, 2 * call + 2)).map(torch.Tensor.clone)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.profiler.profile() as profile:
            actual = compiled(*inputs)
        assert_equal_bytes([t.clone() for t in actual], read(*inputs), f"call {call}")
    assert any("GraphLaunch" in event.key for event in profile.key_averages()), "no graph was launched"
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


class Layer(torch.nn.Module):
    def forward(self, *inputs):
        return tuple(op.fused_gr_read(inputs[0] * 1, *inputs[1:], q8_1=True))


def exported(device):
    inputs = make_inputs(SMALL, 3).map(lambda t: t.to(device))
    tokens = torch.export.Dim("tokens", min=2, max=64)
    activations = ("residual", "block_out", "inject_prev")
    shapes = tuple({0: tokens} if name in activations else None for name in inputs._fields)
    return torch.export.export(Layer(), tuple(inputs), dynamic_shapes=(shapes,))


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11.0+cu130 ended the process in its own loader of packages"
)
def test_aoti_package(device, compiler, tmp_path):
    """Loaded by Python and by C++, for any number of tokens."""
    package, program = str(tmp_path / "read.pt2"), tmp_path / "aoti_package"
    building = build_program(compiler, program) if device == "cpu" else None
    assert torch._inductor.aoti_compile_and_package(exported(device), package_path=package) == package
    model = torch._inductor.aoti_load_package(package)
    cases = [make_inputs(SMALL, tokens).map(lambda t: t.to(device)) for tokens in (2, 17)]
    for inputs in cases:
        assert_equal_bytes(model(*inputs), op.fused_gr_read(*inputs, q8_1=True))
    if building:
        _, complaint = building.communicate()
        assert building.returncode == 0, complaint[-2000:]
        for inputs in cases:
            torch.save(list(inputs), tmp_path / "inputs")
            words = [program, package, tmp_path / "inputs", tmp_path / "outputs", LIBRARIES["cpu"].path]
            done = subprocess.run(words, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            assert_equal_bytes(torch.load(tmp_path / "outputs"), op.fused_gr_read(*inputs, q8_1=True))


def build_program(compiler, program):
    """Begins to; it takes as long as the packaging of the model."""
    command = [compiler, "-std=c++20", "-O0", "-w", Path(__file__).with_name("aoti_package.cpp"), "-o", program]
    command += ["-isystem", TORCH / "include", f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}"]
    command += ["-ltorch_cpu", "-ltorch", "-lc10", "-ldl"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("fold, inject", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("lead", [(0,), (3,), (2, 3), ()], ids=str)
def test_flops(device, lead, fold, inject):
    """As many as of the same maths in PyTorch's own operations."""

    def count(function, *arguments, **options):
        with FlopCounterMode(display=False) as counter:
            function(*arguments, **options)
        return counter.get_total_flops()

    tokens = torch.Size(lead).numel()
    inputs = make_inputs(SMALL, tokens).ask(fold=fold, inject=inject)
    shaped = {
        name: getattr(inputs, name).reshape(*lead, *getattr(inputs, name).shape[1:])
        for name in ("residual", "block_out", "inject_prev")
        if getattr(inputs, name) is not None
    }
    inputs = inputs._replace(**shaped).map(lambda t: t.to(device))
    expected = count(read_eager, *inputs) if tokens else 0
    width, streams, rank = SMALL
    depth = width * streams
    assert expected == tokens * (2 * rank * depth + 2 * depth * rank + 2 * streams * depth * inject)
    assert count(op.fused_gr_read, *inputs, q8_1=True) == expected
    assert count(op.fused_gr_read_, *inputs) == expected
    out = strata_ops.fused_gr_read(*inputs)
    assert count(strata_ops.fused_gr_read_out, *inputs, out=out) == expected
