"""The self-test of a GPU, which decides what variants it may run, and what the library says about it.

The test runs once a device, on its first read that no stream is capturing. What it says goes to the logger
"strata_ops": refusals as warnings, which show by default, the rest as information.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from . import _core
from ._libraries import LIBRARIES, backend_of

_LOGGER = logging.getLogger("strata_ops")
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR)  # of LogLevel in common/backend.hpp


def _log(level: int, line: str) -> None:
    _LOGGER.log(_LEVELS[level], line)


def listen() -> None:
    """Lets every loaded backend speak through Python's logging, and ask the CPU's where it differs from it."""
    for library in LIBRARIES.values():
        if library.loaded:
            backend = _core.load_backend(str(library.path))
            backend.listen(_log)
            backend.set_witness(_core.load_backend(str(LIBRARIES["cpu"].path)))


def check(device: torch.device | str | int = "cuda") -> dict[str, Any]:
    """Runs the self-test of a GPU now and latches what it finds for the reads that follow.

    Every variant computes 80 cases (1 to 8 tokens; pending write, inject rows and q8_1 each off and on; sixteen of them
    with streams of bfloat16) and their bytes are compared: plain with the CPU's answer, which the library keeps as
    hashes, split, staged and the kernels for other geometries with plain, and P4 with staged where
    ``STRATA_HC_SPLIT=7`` asks for it on gfx1200 or gfx1201. About 40 ms on an H200. It may be called again, for one
    after a check that did not complete.

    Args:
        device: a GPU, as a device, its name or its index.

    Returns:
        ``{"device", "gates", "chosen", "why", "cases"}``: the gates that hold, the variant that runs and why, and each
        comparison with, where it is not equal, its first difference: output, index of the 32-bit word, and both bit
        patterns. Of plain against the CPU the library keeps hashes; the CPU computes the case to find the element (None
        where it cannot).

    Raises:
        RuntimeError: the device has no self-test (the CPU is the reference itself), it did not complete, or
            ``STRATA_SELFTEST=0`` was set when the device was first used. An error that leaves the device unusable ends
            the process with status 1.
    """
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    backend = backend_of(place)
    if not backend.has_check:
        raise RuntimeError(f"check: {place} has no self-test, it is what GPUs are compared with; name a GPU")
    index = place.index if place.index is not None else torch.cuda.current_device()
    cases = backend.check(index)
    facts = backend.describe(index)
    return {"device": f"{place.type}:{index}", **{k: facts[k] for k in ("gates", "chosen", "why")}, "cases": cases}


def render(report: dict[str, Any]) -> str:
    """The report of :func:`check` as text for people."""
    lines = [f"{report['device']} runs {report['chosen']}: {report['why']}"]
    names = dict.fromkeys((case["variant"], case["q8_columns"], case["against"]) for case in report["cases"])
    for variant, columns, against in names:
        cases = [
            c for c in report["cases"] if (c["variant"], c["q8_columns"], c["against"]) == (variant, columns, against)
        ]
        unequal = [c for c in cases if not c["equal"]]
        kernel = f"{variant}, {columns} columns"
        lines.append(f"  {kernel:32} {len(cases) - len(unequal):3} of {len(cases):3} cases equal {against}")
        if unequal:
            lines.append(f"    first difference: {_difference(unequal[0])}")
    return "\n".join(lines)


def _difference(case: dict[str, Any]) -> str:
    found = case["first_difference"]
    options = ", ".join(f"{name} {'on' if case[name] else 'off'}" for name in ("fold", "inject", "q8_1"))
    streams = case["stream_dtype"].removeprefix("torch.")
    where = f"{found['output']}, {case['tokens']} tokens, {streams} streams, {options}"
    if found["index"] is None:
        return f"{where} (by hash)"
    return f"{where}: word {found['index']} is 0x{found['got']:08x}, expected 0x{found['expected']:08x}"
