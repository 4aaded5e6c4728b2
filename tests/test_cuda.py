"""What only a GPU has: streams, graphs, another device. That its bits are the CPU's is tested with everything else."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import strata_ops
from strata_ops import debug
from support import MODEL, SMALL, assert_same, case, cut, make_inputs, named, runners
from test_build import missing
from test_process import python
from test_refusals import refusal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
op = torch.ops.strata
gpu_runners = pytest.mark.parametrize("runner", [r for r in runners() if r.device == "cuda"], ids=str)


ROOT = Path(__file__).resolve().parent.parent


def on_gpu(tokens, geometry=MODEL, device="cuda"):
    inputs, exact = case(geometry)
    return inputs.tokens(slice(tokens)).map(lambda t: t.clone().to(device)), cut(exact, slice(tokens))


def forced(runner, inputs):
    return debug.fused_gr_read(*inputs, q8_1=True, variant=runner.variant, q8_columns=runner.q8_columns)


@pytest.mark.parametrize("form, tokens", [("functional", 8), ("in place", 1), ("out", 9)])
def test_capture_as_the_first_call(form, tokens):
    """In a fresh process, before anything of ours has run there; then replayed with other inputs."""
    code = f"""
    import torch
    from support import MODEL, assert_same, make_inputs, named
    from test_read import buffers
    op = torch.ops.strata
    everything = make_inputs(MODEL, {3 * tokens})
    exact = named(op.fused_gr_read(*everything, q8_1=True))  # the CPU's
    parts = [slice(i * {tokens}, (i + 1) * {tokens}) for i in range(3)]
    static = everything.tokens(parts[0]).map(lambda t: t.clone().cuda())
    out = buffers(exact._make(t[parts[0]] for t in exact), static, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if "{form}" == "functional":
            result = named(op.fused_gr_read(*static, q8_1=True))
        elif "{form}" == "in place":
            result = named(op.fused_gr_read_(*static, q8_1=True), static.residual)
        else:
            op.fused_gr_read.out(*static, q8_1=True, **out)
            result = named(out.values())
    for part in [*parts, *reversed(parts)]:
        for place, value in zip(static, everything.tokens(part)):
            place.copy_(value)
        graph.replay()
        assert_same(result, exact._make(t[part] for t in exact), str(part))
    import strata_ops  # a call after it, with the self-test behind it, agrees
    again = everything.tokens(parts[0]).map(lambda t: t.cuda())
    assert_same(strata_ops.fused_gr_read(*again, q8_1=True), exact._make(t[parts[0]] for t in exact))
    print("equal")
    """
    done = python("-c", "import strata_ops\n" + textwrap.dedent(code))
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stdout + done.stderr


@gpu_runners
@pytest.mark.parametrize("tokens", [0, 1, 8, 17])
def test_every_variant_in_a_graph(runner, tokens):
    inputs, exact = on_gpu(tokens)
    filler = torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = named(forced(runner, inputs))
        filler += 1  # so that a graph of no tokens is not empty
    for value in result:
        value.view(torch.uint8).fill_(0xAA)
    for _ in range(5):
        graph.replay()
    assert_same(result, exact)
    assert filler.item() == 5


def test_the_current_stream_is_used_and_not_waited_for():
    inputs, exact = on_gpu(4)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        strata_ops.fused_gr_read(*inputs, q8_1=True)  # whatever happens once
        side.synchronize()
        torch.cuda._sleep(2_000_000_000)
        result = strata_ops.fused_gr_read(*inputs, q8_1=True)
        done = side.record_event()
    assert not done.query(), "the read did not wait for its stream, or the host waited for the read"
    assert torch.cuda.current_stream().query(), "work on another stream"
    side.synchronize()
    assert_same(result, exact)


@gpu_runners
def test_streams_at_once(runner):
    """Reads in flight side by side share no scratch and no counter."""
    inputs, exact = on_gpu(8)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(forced(runner, inputs))
    torch.cuda.synchronize()
    for result in results:
        assert_same(named(result), exact)


@gpu_runners
@pytest.mark.parametrize("tokens", [1, 8, 17])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_arguments_written_directly_ahead(runner, tokens, captured):
    """A read sees what the kernel ahead of it wrote, weights too, however early its own kernels begin."""
    first, exact = on_gpu(tokens)
    second = make_inputs(MODEL, tokens, seed=5)
    other = named(op.fused_gr_read(*second, q8_1=True))  # the CPU's
    second = second.map(lambda t: t.cuda())
    static = first.map(torch.empty_like)

    def writes_and_reads():
        """Each argument in turn is the last to be written; the two contents alternate."""
        made = []
        for last in range(len(static)):
            for source, expected in ((first, exact), (second, other)):
                for i in sorted(range(len(static)), key=lambda i: i == last):
                    static[i].copy_(source[i])
                made.append((static._fields[last], named(forced(runner, static)), expected))
        return made

    writes_and_reads()  # kernels are loaded
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = writes_and_reads()
        for _ in range(3):
            graph.replay()
    else:
        torch.cuda._sleep(100_000_000)  # all is queued before any of it runs
        made = writes_and_reads()
    for last, result, expected in made:
        assert_same(result, expected, f"{last} written last")


@gpu_runners
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_a_thousand_times(runner, tokens):
    inputs, exact = on_gpu(tokens)
    expected = exact._make(t.cuda().view(torch.uint8) for t in exact)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for value, wanted in zip(forced(runner, inputs), expected, strict=True):
            different += (value.view(torch.uint8) != wanted).sum()
    assert different.item() == 0


def test_inputs_freed_before_the_read_has_run():
    """Strided activations are copied; the copies live as long as the kernels need them."""
    inputs, exact = on_gpu(8)
    strata_ops.fused_gr_read(*inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    strided = torch.stack([inputs.residual, inputs.residual], -1)[..., 0]
    result = strata_ops.fused_gr_read(strided, *inputs[1:], q8_1=True)
    del strided
    trash = [torch.full_like(inputs.residual, float("nan")) for _ in range(8)]
    assert_same(result, exact)
    del trash


def test_the_device_of_the_tensors_is_used():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    for device in ("cuda:1", "cuda:0"):
        for geometry in (MODEL, SMALL):
            inputs, exact = on_gpu(8, geometry, device)
            with torch.cuda.device(0):
                result = strata_ops.fused_gr_read(*inputs, q8_1=True)
                assert torch.cuda.current_device() == 0
            assert all(t.device == torch.device(device) for t in result)
            assert_same(result, exact)
    here, _ = on_gpu(2, device="cuda:0")
    there, _ = on_gpu(2, device="cuda:1")
    for name in here._fields[1:]:
        mixed = here._replace(**{name: getattr(there, name)})
        assert f"'{name}'" in refusal(op.fused_gr_read, *mixed)


def test_devices_do_not_mix():
    inputs, _ = on_gpu(2)
    for name in inputs._fields[1:]:
        mixed = inputs._replace(**{name: getattr(inputs, name).cpu()})
        assert f"'{name}'" in refusal(op.fused_gr_read, *mixed)
    assert "'w_norm'" in refusal(op.fused_gr_read, inputs.residual.cpu(), *inputs[1:])


def test_a_refusal_breaks_nothing():
    """During capture too: the graph that goes on without the refused call is sound."""
    inputs, exact = on_gpu(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        refusal(op.fused_gr_read, *inputs._replace(w_up=inputs.w_up.float()))
        result = named(op.fused_gr_read(*inputs, q8_1=True))
    graph.replay()
    assert_same(result, exact)


@pytest.mark.parametrize("text, variant", [("0", "plain"), ("1", "split"), ("7", "staged"), ("70", "staged")])
def test_the_variable(text, variant):
    """P4 is for gfx1200 and gfx1201 alone; what names nothing means staged, like nothing at all."""
    done = python("-m", "strata_ops", "info", "--json", STRATA_HC_SPLIT=text)
    device = {b["name"]: b for b in json.loads(done.stdout)["backends"]}["cuda"]["devices"][0]
    assert device["chosen"] == variant and device["why"]


def test_tuned_variants_are_for_the_models_geometry():
    inputs = make_inputs(SMALL, 1).map(lambda t: t.cuda())
    for variant in ("plain", "split", "staged", "p4"):
        text = refusal(debug.fused_gr_read, *inputs, variant=variant)
        assert variant in text


# ----------------------------------------------------------------------------------------------------------------------
# How errors of the self-test end, on a real card. (Every code at every call: tests/cpp/sim_errors.cpp.)


def test_a_thread_that_has_not_called_the_runtime():
    """Where all memory is there already, our read is the first that a new thread asks of the driver."""
    code = """
    import threading, torch
    from support import MODEL, assert_same, make_inputs, named
    from test_read import buffers
    read = torch.ops.strata.fused_gr_read
    inputs = make_inputs(MODEL, 1)
    exact = named(read(*inputs, q8_1=True))
    inputs = inputs.map(lambda t: t.cuda())
    out = buffers(exact, inputs, "cuda")
    read.out(*inputs, q8_1=True, **out)
    for tensor in out.values():
        tensor.zero_()
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: read.out(*inputs, q8_1=True, **out))
    thread.start()
    thread.join()
    assert_same(named(out.values()), exact)
    print("equal")
    """
    done = python("-c", textwrap.dedent(code), STRATA_HC_SPLIT="stream")
    assert done.stdout == "equal\n", done.stderr


def build_fault_library(folder):
    """libstrata_cuda.so for the card at hand with the fault; cmake/cuda.cmake has the command."""
    places = os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent), "/usr/local/cuda/bin"])
    absent = [tool for tool in ("nvcc", "cmake", "ninja") if not shutil.which(tool, path=places)]
    if absent:
        missing(f"STRATA_FAULT_LIBRARY is not set, and it cannot be built without {', '.join(absent)}")
    major, minor = torch.cuda.get_device_capability()
    environment = {**os.environ, "PATH": places, "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"}
    options = ["STRATA_CUDA=ON", "STRATA_HIP=OFF", "STRATA_SIM=OFF", "STRATA_FAULT=kOutOfBounds"]
    options += ["STRATA_FAULT_ARCHITECTURE=gfx1201", f"Python_EXECUTABLE={sys.executable}"]
    for command in (
        ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *(f"-D{option}" for option in options)],
        ["cmake", "--build", folder, "--target", "strata_cuda"],
    ):
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "libstrata_cuda.so"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A Python whose strata_ops has a CUDA library with a P4 that stores far outside of every buffer, and a gate that
    takes the card for gfx1201: STRATA_FAULT_LIBRARY names it, or it is built."""
    folder = tmp_path_factory.mktemp("faulty")
    library = os.environ.get("STRATA_FAULT_LIBRARY") or build_fault_library(folder / "build")
    package = Path(strata_ops.__file__).parent
    shutil.copytree(package, folder / "strata_ops", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(library, folder / "strata_ops/lib/libstrata_cuda.so")
    places = os.pathsep.join([str(folder), str(Path(__file__).parent)])

    def run(code, **environment):
        return python("-c", textwrap.dedent(code), PYTHONPATH=places, **environment)

    return run


FIRST_READ = """
    import atexit, torch, strata_ops
    from support import MODEL, assert_same, make_inputs
    assert "kOutOfBounds" in strata_ops.info()["backends"][1]["built_for"]
    inputs = make_inputs(MODEL, 2)
    exact = strata_ops.fused_gr_read(*inputs)
    inputs = inputs.map(lambda t: t.cuda())
    atexit.register(print, "destructors", flush=True)
    print("reading", flush=True)
    assert_same(strata_ops.fused_gr_read(*inputs), exact)
    print("equal", flush=True)
"""


def test_a_lost_device_ends_the_process(faulty):
    """Status 1 and one line, no destructor: a candidate that stores out of bounds leaves no device to fall back on."""
    done = faulty(FIRST_READ, STRATA_HC_SPLIT="7")
    assert (done.returncode, done.stdout) == (1, "reading\n"), done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("strata_ops: fatal: ")]
    assert "cudaErrorIllegalAddress (700) from " in line and " on cuda:0: " in line


@pytest.mark.parametrize("text", ["0", "1", "2"])
def test_a_candidate_that_is_not_asked_for_never_runs(faulty, text):
    done = faulty(FIRST_READ, STRATA_HC_SPLIT=text)
    assert (done.returncode, done.stdout) == (0, "reading\nequal\ndestructors\n"), done.stdout + done.stderr


def test_a_check_without_memory_is_not_completed():
    """And nothing is lost by it: with memory it completes, in the same process, and reads are right."""
    code = """
    import torch, strata_ops
    from strata_ops import debug
    from support import MODEL, assert_same, make_inputs, named
    inputs = make_inputs(MODEL, 2)
    exact = strata_ops.fused_gr_read(*inputs, q8_1=True)
    inputs = inputs.map(lambda t: t.cuda())
    debug.fused_gr_read(*inputs, q8_1=True, variant="plain")  # loads the kernels, which takes memory too
    hoard = []
    for size in (1 << 30, 1 << 26, 10 << 20, 1 << 20):  # as torch's allocator has no room to spare behind any of them
        while True:
            try:
                hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    try:
        strata_ops.check()
    except RuntimeError as error:
        print(error)
    backend = {b["name"]: b for b in strata_ops.info()["backends"]}["cuda"]
    print(backend["devices"][0]["gates"]["state"], backend["devices"][0]["chosen"])
    hoard.clear()
    torch.cuda.empty_cache()
    assert_same(strata_ops.fused_gr_read(*inputs, q8_1=True), exact)  # without a check
    print(strata_ops.check()["gates"]["state"])
    assert_same(strata_ops.fused_gr_read(*inputs, q8_1=True), exact)
    """
    done = python("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stdout + done.stderr
    error, state, again = done.stdout.splitlines()
    assert error.startswith(
        "the self-test of cuda:0 did not complete: allocating memory gave cudaErrorMemoryAllocation"
    )
    assert (state, again) == ("not completed staged", "completed")
