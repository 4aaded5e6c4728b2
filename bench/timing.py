"""How the benchmark takes a time: cold weights, many samples, median and spread."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch


def spread(samples: Sequence[float]) -> dict:
    """Median, 10th and 90th percentile of microseconds."""
    ordered = sorted(samples)
    pick = lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))]  # noqa: E731
    return {"us_median": statistics.median(ordered), "us_p10": pick(0.1), "us_p90": pick(0.9)}


@functools.cache
def _stream(device: int, use: str) -> torch.cuda.Stream:
    """The one stream for a use: after reads on six streams of a process all take up to 0.5 us longer (H200)."""
    return torch.cuda.Stream(device)


def time_graph(calls: Sequence[Callable[[], object]], replays: int) -> list[float]:
    """Microseconds a call, of ``replays`` replays of one CUDA graph that holds ``calls`` back to back.

    The calls differ in their weights, which together are larger than the card's cache, so each finds its own cold.
    """
    stream = _stream(torch.cuda.current_device(), "capture")
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    keep = []
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            keep.append(call())
    return _time_on_device(graph.replay, replays, len(calls))


def time_alone(
    calls: Sequence[Callable[[], object]],
    before: Callable[[], object],
    replays: int,
    beside: Sequence[Callable[[], object]] | None = None,
) -> list[float]:
    """Microseconds a call of :func:`time_graph`, each call behind ``before()``, whose own time is taken off.

    ``before`` is a small kernel that the call depends on, so that no call finds the card still busy with the one ahead
    of it. Its own time is the median of a graph of as many of it alone. ``beside``, where given, has for each call what
    a second stream runs next to ``before()``; the call waits for it.
    """
    own = statistics.median(time_graph([before] * len(calls), replays))

    def behind(call, other):
        if other is None:
            before()
            return call()
        side = _stream(torch.cuda.current_device(), "beside")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kept = other()
        before()
        torch.cuda.current_stream().wait_stream(side)
        return call(), kept

    pairs = zip(calls, beside or [None] * len(calls))
    return [t - own for t in time_graph([lambda c=call, o=other: behind(c, o) for call, other in pairs], replays)]


def time_eager(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Microseconds a call, of ``rounds`` rounds of the calls launched one by one from Python."""

    def all_calls():
        for call in calls:
            call()

    all_calls()
    return _time_on_device(all_calls, rounds, len(calls))


def _time_on_device(run: Callable[[], object], rounds: int, calls: int) -> list[float]:
    for _ in range(3):
        run()
    samples = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return samples


def time_alternating(groups: dict[str, Sequence[Callable[[], object]]], rounds: int) -> dict[str, list[float]]:
    """Microseconds a call on the CPU, for each group of calls, one call of each group in turn.

    A neighbour that slows the machine for a while then slows all groups alike. Every group runs through its own calls
    (its weight sets) in order.
    """
    samples: dict[str, list[float]] = {name: [] for name in groups}
    for calls in groups.values():
        for call in calls[:2]:
            call()
    for i in range(rounds):
        for name, calls in groups.items():
            call = calls[i % len(calls)]
            begin = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - begin) * 1e6)
    return samples


def measured_bandwidth(device: torch.device) -> float:
    """Bytes a second that the card's memory gives: the better of a large copy (read + write) and a large sum."""
    source = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copy = min(_time_on_device(lambda: target.copy_(source), 7, 1))
    total = min(_time_on_device(lambda: source.sum(), 7, 1))
    return max(2 * size / copy, size / total) * 1e6
