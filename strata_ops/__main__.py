"""`python -m strata_ops info | doctor | check | parity | demo | evidence`.

Errors are one line with a remedy, exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"strata_ops: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m strata_ops", description="The gated-residual read: what runs, its bits, a demo.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    info = commands.add_parser("info", help="versions, backends, devices, the variant that runs and why")
    info.add_argument("--card", help="a simulated card instead of what is here, gfx1201 for example")
    info.add_argument("--json", action="store_true", help="print one JSON object")

    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what would run and why not P4, what to set",
        description="Looks at everything and judges it; GPUs go through their self-test. "
        "Exit status 0: nothing is wrong, 1: something is, 2: could not be run.",
    )
    doctor.add_argument("--card", help="a simulated card instead of what is here; its self-test does not run")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")

    check = commands.add_parser(
        "check",
        help="run a GPU's self-test: which variants are right, which one runs",
        description="Runs a GPU's self-test. Exit status 0: plain equals the CPU and every variant equals plain, "
        "1: not so, 2: could not be run.",
    )
    check.add_argument("--device", default="cuda", help="cuda or cuda:N (also on ROCm); default cuda")
    check.add_argument("--json", action="store_true", help="print one JSON object")

    parity = commands.add_parser(
        "parity",
        help="compare every variant with the CPU's portable path, byte for byte",
        description="Compares every variant with the CPU's portable path, byte for byte. "
        "Exit status 0: all equal, 1: not equal, 2: could not be run.",
    )
    parity.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (also on ROCm); default cpu")
    parity.add_argument("--card", help="a simulated card, by name or as name,lanes,shared bytes,compute units")
    parity.add_argument("--seed", type=int, default=0, help="of the order in which a simulated card runs; default 0")
    parity.add_argument("--strict", action="store_true", help="the simulated card looks at every access to memory")
    parity.add_argument("--json", action="store_true", help="print one JSON object")

    demo = commands.add_parser(
        "demo", help="a real read on made-up weights: what comes out and how long it takes beside eager PyTorch"
    )
    demo.add_argument("--device", help="cpu, cuda or cuda:N; default: the CPU, and the GPU where torch has one")

    evidence = commands.add_parser(
        "evidence", help="one file to attach to an issue: gate, parity, times of staged and P4, clocks, profile"
    )
    evidence.add_argument("--device", default="cuda", help="cuda or cuda:N (also on ROCm); default cuda")
    evidence.add_argument("--card", help="a simulated card, which has no times")
    evidence.add_argument("--trials", type=int, default=5, help="child processes of each kind; default 5")
    evidence.add_argument("--out", default="strata_evidence.txt", help="default strata_evidence.txt")
    return parser


def _progress() -> Callable[[str], None]:
    """Shows one changing line on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _info(args: argparse.Namespace) -> int:
    from .info import info, render

    report = info(args.card)
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import doctor, render

    report = doctor(args.card)
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0 if report["ok"] else 1


def _check(args: argparse.Namespace) -> int:
    from .gate import check, render

    report = check(_device(args.device))
    print(json.dumps(report) if args.json else render(report))
    return 0 if all(case["equal"] for case in report["cases"]) else 1


def _parity(args: argparse.Namespace) -> int:
    from .parity import parity, render

    progress = _progress()
    try:
        result = parity(_device(args.device), progress, card=args.card, seed=args.seed, strict=args.strict)
    finally:
        progress("")
    print(json.dumps(result) if args.json else render(result))
    return 0 if result["ok"] else 1


def _demo(args: argparse.Namespace) -> int:
    import torch

    from ._libraries import LIBRARIES
    from .demo import demo

    if args.device:
        devices = [_device(args.device)]
    else:
        with_gpu = torch.cuda.is_available() and (LIBRARIES["cuda"].loaded or LIBRARIES["hip"].loaded)
        devices = ["cpu", "cuda"] if with_gpu else ["cpu"]
    for device in devices:
        demo(device)
    return 0


def _evidence(args: argparse.Namespace) -> int:
    from pathlib import Path

    from .evidence import evidence, ok, render, write

    device = "cpu" if args.card else _device(args.device)
    progress = _progress()
    try:
        report = evidence(device, card=args.card, trials=args.trials, progress=progress)
    finally:
        progress("")
    write(report, Path(args.out))
    print(render(report))
    print(f"\nwritten to {args.out}: please attach it to an issue")
    return 0 if ok(report) else 1


def _device(text: str) -> str:
    """Checks a device's name, and that it is there."""
    import torch

    from ._libraries import backend_of

    try:
        device = torch.device(text)
    except RuntimeError:
        raise RuntimeError(f"'{text}' is no device; use cpu, cuda or cuda:N") from None
    backend_of(device)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    command = {
        "info": _info,
        "doctor": _doctor,
        "check": _check,
        "parity": _parity,
        "demo": _demo,
        "evidence": _evidence,
    }[args.command]
    try:
        status = command(args)
        sys.stdout.flush()
        return status
    except RuntimeError as error:
        line, _, _ = str(error).partition("\n")
        print(f"strata_ops: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, `| head` for one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
