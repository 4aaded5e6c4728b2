"""What the owner of a card can tell: `python -m strata_ops evidence` writes one file to attach to an issue.

The file is a page of text and then the same as JSON: versions, the card and its clocks, the self-test's lines, the
comparison with the CPU byte for byte, and times. Times come from child processes with STRATA_HC_SPLIT=2 and =7 in turn,
so that a card that warms up or throttles does so for both; each child replays a graph of reads whose weights together
are larger than any cache. On gfx1200 and gfx1201 the child with =7 must end in P4, elsewhere it is a second staged one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import cards
from ._inputs import Inputs, make_inputs
from .info import info
from .info import render as render_info
from .parity import parity
from .parity import render as render_parity

SELECTORS = ("2", "7")
TOKENS = tuple(range(1, 9))
WEIGHT_SETS = 48  # 633 MB of weights
CARD_TOKENS = (1, 3)  # a simulated card has no times, and takes its own
CLOCK_COMMANDS = (
    "amd-smi static --asic --driver --vram", "amd-smi metric --clock --power --temperature",
    "rocm-smi --showproductname --showdriverversion --showclocks --showpower",
    "nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw --format=csv",
)  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# A child process: one selector


def _digest(outputs) -> str:
    whole = hashlib.sha256()
    for value in outputs:
        if value is not None:
            whole.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def _read(inputs: Inputs):
    return torch.ops.strata.fused_gr_read.default(*inputs, q8_1=True)


def _microseconds(inputs: Inputs, sets: list[Inputs], rounds: int) -> list[float]:
    """Of one read, for each replay of a graph with a read by each set of weights."""
    calls = [inputs._replace(w_norm=s.w_norm, w_down=s.w_down, w_up=s.w_up, w_inject=s.w_inject) for s in sets]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _read(calls[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [_read(call) for call in calls]
    samples = []
    for number in range(rounds + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 3:
            samples.append(begin.elapsed_time(end) * 1e3 / len(calls))
    del kept
    return samples


def child(device: str, card: str | None, rounds: int) -> dict[str, Any]:
    """Reads with the selector of the environment: which variant ran, hashes of all outputs, times."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    hashes, times = {}, {}
    if card is not None:
        opened = cards.open_card(card)
        for tokens in CARD_TOKENS:
            hashes[tokens] = _digest(opened.read(*make_inputs(tokens, seed=1), q8_1=True))
        return {"facts": opened.describe(), "hashes": hashes, "times": times}
    sets = [make_inputs(1, seed=0).to(device)]
    for _ in range(WEIGHT_SETS - 1):
        sets.append(Inputs(*(t.roll(1, 0) if t.dtype == torch.bfloat16 else t for t in sets[-1])))
    for tokens in TOKENS:
        inputs = make_inputs(tokens, seed=1).to(device)
        hashes[tokens] = _digest(_read(inputs))
        times[tokens] = _microseconds(inputs, sets, rounds)
    index = torch.device(device).index or 0
    backends = [backend for backend in info()["backends"] if backend["name"] != "cpu" and backend.get("devices")]
    return {"facts": backends[0]["devices"][index], "hashes": hashes, "times": times}


# ----------------------------------------------------------------------------------------------------------------------
# The file


def _run(command: list[str], environment: dict[str, str], limit: int) -> tuple[str, str]:
    """(standard output, what went wrong or was logged)."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit, env={**os.environ, **environment}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    failed = f"exit status {done.returncode}\n" if done.returncode else ""
    return done.stdout, failed + done.stderr


def _child_command(device: str, card: str | None, rounds: int) -> list[str]:
    return [sys.executable, "-m", "strata_ops.evidence", device, card or "", str(rounds)]


def _trials(device: str, card: str | None, trials: int, rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """{selector: {"runs": [...], "log"}}, the selectors in turn."""
    found: dict[str, Any] = {selector: {"runs": [], "log": ""} for selector in SELECTORS}
    for trial in range(trials):
        for selector in SELECTORS:
            progress(f"child {trial + 1} of {trials} with STRATA_HC_SPLIT={selector}")
            out, log = _run(_child_command(device, card, rounds), {"STRATA_HC_SPLIT": selector}, 900)
            found[selector]["log"] = found[selector]["log"] or log.strip()[-6000:]
            try:
                found[selector]["runs"].append(json.loads(out.splitlines()[-1]))
            except (IndexError, ValueError):
                found[selector]["runs"].append({"error": log.strip()[-2000:]})
    return found


def compare(trials: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each number of tokens: medians and ranges of the trials, whether they overlap, whether bytes agree."""
    rows = []
    good = {selector: [run for run in trials[selector]["runs"] if "error" not in run] for selector in SELECTORS}
    tokens = sorted({int(t) for runs in good.values() for run in runs for t in run["hashes"]})
    for t in tokens:
        row: dict[str, Any] = {"tokens": t}
        for selector, runs in good.items():
            medians = [statistics.median(run["times"][str(t)]) for run in runs if run["times"]]
            row[selector] = (
                {"us": statistics.median(medians), "from": min(medians), "to": max(medians)} if medians else None
            )
        hashes = {run["hashes"][str(t)] for runs in good.values() for run in runs}
        row["equal_bytes"] = len(hashes) == 1 and all(good.values())
        first, second = (row[selector] for selector in SELECTORS)
        row["ranges_overlap"] = (
            None if first is None or second is None else first["from"] <= second["to"] and second["from"] <= first["to"]
        )
        rows.append(row)
    return rows


def _profile(device: str, progress: Callable[[str], None]) -> dict[str, str]:
    """Kernel statistics by ROCm's profiler, where it is installed."""
    for tool, options in (
        ("rocprofv3", ["--kernel-trace", "--stats", "--output-format", "csv", "-d"]),
        ("rocprof", ["--stats", "-d"]),
    ):
        if shutil.which(tool) is None:
            continue
        progress(tool)
        with tempfile.TemporaryDirectory() as folder:
            command = [
                tool,
                *options,
                folder,
                *(["--"] if tool == "rocprofv3" else []),
                *_child_command(device, None, 3),
            ]
            _, log = _run(command, {"STRATA_HC_SPLIT": "7"}, 900)
            tables = [path.read_text(errors="replace") for path in Path(folder).rglob("*stats*.csv")]
        return {"tool": tool, "statistics": "\n".join(tables)[:20000] or log[-4000:]}
    return {"tool": "none found", "statistics": ""}


def evidence(
    device: str,
    *,
    card: str | None = None,
    trials: int = 5,
    rounds: int = 30,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Everything that the file holds."""
    clocks = {}
    for command in CLOCK_COMMANDS if card is None else ():
        words = command.split()
        if shutil.which(words[0]):
            clocks[command] = "\n".join(part.strip() for part in _run(words, {}, 60) if part.strip())[:6000]
    children = _trials(device, card, 1 if card else trials, rounds, progress)
    report = {
        "info": info(card),
        "system": {"platform": platform.platform(), "environment": _environment()},
        "clocks": clocks,
        "children": children,
        "comparison": compare(children),
        # A simulated card's gate has compared what it runs; the rest takes it minutes and has a command of its own.
        "parity": parity(device, progress) if card is None else None,
        "profile": _profile(device, progress) if card is None and torch.version.hip else {"tool": "", "statistics": ""},
    }
    report["p4"] = _p4(report)
    return report


def _environment() -> dict[str, str]:
    wanted = re.compile(r"^(STRATA_|HIP_|HSA_|ROCR_|CUDA_VISIBLE|GPU_|AMD_)")
    return {name: value for name, value in sorted(os.environ.items()) if wanted.match(name)}


def _p4(report: dict[str, Any]) -> str:
    """What became of the wish for P4, in one line."""
    runs = [run for run in report["children"]["7"]["runs"] if "error" not in run]
    if not runs:
        return "no child with STRATA_HC_SPLIT=7 ended well"
    facts = runs[0]["facts"]
    gfx12 = facts["arch"].split(":")[0] in ("gfx1200", "gfx1201")
    chosen = facts["chosen"]
    verdict = "as it must" if (chosen == "p4") == gfx12 else "WHICH IT MUST NOT"
    return f"STRATA_HC_SPLIT=7 on {facts['arch']} runs {chosen}, {verdict}: {facts['why']}"


def ok(report: dict[str, Any]) -> bool:
    """Whether everything that was run came out right; times have no say."""
    return (
        (report["parity"] is None or report["parity"]["ok"])
        and all(row["equal_bytes"] for row in report["comparison"])
        and bool(report["comparison"])
        and "WHICH" not in report["p4"]
        and not any("error" in run for child in report["children"].values() for run in child["runs"])
    )


def render(report: dict[str, Any]) -> str:
    """The page of text."""
    lines = [
        "strata_ops evidence: " + ("all well" if ok(report) else "NOT ALL WELL"), "",
        render_info(report["info"]), report["system"]["platform"], "",
        report["p4"], "",
        render_parity(report["parity"]) if report["parity"] else "parity: left out for a simulated card", "",
        f"{'us a read':>12s}{'=2: median (range)':>28s}{'=7: median (range)':>28s}{'ranges':>12s}{'bytes':>8s}",
    ]  # fmt: skip
    for row in report["comparison"]:
        cells = []
        for selector in SELECTORS:
            cell = row[selector]
            cells.append("-" if cell is None else f"{cell['us']:.2f} ({cell['from']:.2f} to {cell['to']:.2f})")
        overlap = {None: "-", True: "overlap", False: "apart"}[row["ranges_overlap"]]
        lines.append(
            f"{'T=' + str(row['tokens']):>12s}{cells[0]:>28s}{cells[1]:>28s}{overlap:>12s}"
            f"{'equal' if row['equal_bytes'] else 'DIFFER':>8s}"
        )
    for selector in SELECTORS:
        lines += [
            "",
            f"what a child with STRATA_HC_SPLIT={selector} said:",
            report["children"][selector]["log"] or "nothing",
        ]
    for command, text in report["clocks"].items():
        lines += ["", f"$ {command}", text]
    if report["profile"]["statistics"]:
        lines += ["", report["profile"]["tool"], report["profile"]["statistics"]]
    return "\n".join(lines)


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(render(report) + "\n\n" + "-" * 40 + " JSON\n" + json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], sys.argv[2] or None, int(sys.argv[3]))))
