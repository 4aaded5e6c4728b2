"""What is installed, what would run on each device, why P4 does not, and what to set: `python -m strata_ops doctor`.

The facts are those of `info` and of the self-test; here they are judged.
"""

from __future__ import annotations

import difflib
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import _core
from .gate import check
from .info import info
from .info import render as render_info

# All environment variables of ours. The first three are read once, when a GPU is first used.
VARIABLES = {
    _core.SELECTOR_VARIABLE: f"the variant that a GPU runs: {_core.SELECTOR_VALUES}",
    _core.Q8_FUSE_VARIABLE: "1: q8_1 by the 32-column up kernel",
    _core.SELFTEST_VARIABLE: "0: no self-test, and nothing above staged",
    "STRATA_CUDA": "building: OFF leaves the CUDA library out, ON insists on it",
    "STRATA_HIP": "building: the same of the HIP library",
    "STRATA_HIP_HEADERS": "building: where ROCm's headers are",
    "STRATA_REQUIRE_ALL": "testing: nothing may be left out",
    "STRATA_TRITON": "testing: Triton's unpacked wheel, for its HIP compiler",
    "STRATA_TINYGRAD": "testing: tinygrad's source tree, for its emulator",
    "STRATA_FAULT_LIBRARY": "testing: a CUDA library that is built with a fault",
    "STRATA_ISA_BUILD": "testing: where objects for the emulator are built",
}
_PREFIX = "STRATA_"
_SWITCHES = (_core.Q8_FUSE_VARIABLE, _core.SELFTEST_VARIABLE)
_DRIVERS = {"CUDA": "/dev/nvidiactl", "ROCm": "/dev/kfd"}  # what a machine with such a card and its driver has


def doctor(card: str | None = None) -> dict[str, Any]:
    """Looks at everything and judges it. GPUs go through their self-test; a simulated `card` does not, since its own
    takes minutes.

    Returns:
        ``{"ok", "findings", "devices", "environment", "installed", "info"}``. A finding is ``{"level", "what", "do"}``
        with level "problem" (``ok`` is False) or "note", and what to do, None where there is nothing. A device is
        ``{"device", "arch", "runs", "why", "p4"}``, and ``p4`` ``{"runs", "why_not", "do"}``. The environment has the
        variables of ours that are set, ``{"name", "text", "what"}`` with ``what`` None for one that we do not know.
    """
    unchecked = _run_checks() if card is None else {}
    report = info(card)
    environment = [
        {"name": name, "text": text, "what": VARIABLES.get(name)}
        for name, text in sorted(os.environ.items())
        if name.startswith(_PREFIX)
    ]
    findings = _judge_environment(environment)
    devices = []
    for backend in report["backends"]:
        findings += _judge_backend(backend)
        for facts in backend.get("devices", []):
            name = _device_name(backend["name"], facts["index"])
            reason = facts.get("error") or unchecked.get(name)
            findings += _judge_device(name, facts, reason)
            if "error" not in facts:
                devices.append(_device(name, facts))
    return {
        "ok": not any(finding["level"] == "problem" for finding in findings),
        "findings": findings,
        "devices": devices,
        "environment": environment,
        "installed": {name: _version(name) for name in ("torch", "transformers", "triton", "numpy")},
        "info": report,
    }


def _run_checks() -> dict[str, str]:
    """Runs every GPU's self-test; why, for those where it did not complete."""
    unchecked = {}
    for backend in info()["backends"]:
        for facts in backend.get("devices", []):
            if "gates" in facts:
                name = _device_name(backend["name"], facts["index"])
                try:
                    check(name)
                except RuntimeError as error:
                    unchecked[name] = str(error)
    return unchecked


def _device_name(backend: str, index: int) -> str:
    """As torch has it; its ROCm builds say cuda too."""
    return "cpu" if backend == "cpu" else f"{'cuda' if backend == 'hip' else backend}:{index}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nearest(name: str) -> str | None:
    """The variable that somebody may have meant; what they all begin with does not count."""
    ends = [variable.removeprefix(_PREFIX) for variable in VARIABLES]
    near = difflib.get_close_matches(name.removeprefix(_PREFIX), ends, n=1)
    return _PREFIX + near[0] if near else None


def _problem(what: str, do: str) -> dict[str, str | None]:
    return {"level": "problem", "what": what, "do": do}


def _note(what: str, do: str | None = None) -> dict[str, str | None]:
    return {"level": "note", "what": what, "do": do}


def _judge_environment(environment: list[dict[str, Any]]) -> list[dict[str, str | None]]:
    findings = []
    for variable in environment:
        name, text = variable["name"], variable["text"]
        if variable["what"] is None:
            near = _nearest(name)
            remedy = f"set {near} if that is meant" if near else f"unset it; there are {', '.join(VARIABLES)}"
            findings.append(_problem(f"{name} is set, but there is no such variable", remedy))
        elif name == _core.SELECTOR_VARIABLE and not _core.fused_gr_env_known(text):
            findings.append(
                _problem(f"{name}={text!r} names no variant, so staged runs", f"set it to {_core.SELECTOR_VALUES}")
            )
        elif name in _SWITCHES and text not in ("0", "1"):
            findings.append(_problem(f"{name}={text!r} has no effect", "set it to 0 or 1, or unset it"))
        elif name == _core.SELFTEST_VARIABLE and text == "0":
            findings.append(_note(f"{name}=0: nothing checks that a GPU's bits are right", f"unset {name}"))
    if _core.ARCH_OVERRIDE_VARIABLE in os.environ:
        findings.append(
            _note(f"{_core.ARCH_OVERRIDE_VARIABLE} is set: what a card says that it is may not be what it is")
        )
    return findings


def _judge_backend(backend: dict[str, Any]) -> list[dict[str, str | None]]:
    """A library that this torch could use and that is not there; a card that this torch cannot use."""
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip}.get(backend["name"])
    if "built_for" not in backend:
        if built is not None:
            return [
                _problem(
                    f"torch {torch.__version__} uses GPUs, but strata_ops cannot: {backend['reason']}",
                    "build strata_ops in this environment: pip install --no-build-isolation . in its source",
                )
            ]
        kind = {"cuda": "CUDA", "hip": "ROCm"}[backend["name"]]
        if torch.version.cuda is None and torch.version.hip is None and Path(_DRIVERS[kind]).exists():
            return [_note(f"this machine has a card for {kind}, but torch is a CPU build", f"install torch for {kind}")]
        return []
    if backend["no_devices"]:
        return [_note(f"no GPU can be used: {backend['no_devices']}")]
    return []


def _judge_device(name: str, facts: dict[str, Any], reason: str | None) -> list[dict[str, str | None]]:
    if "error" in facts:
        return [_problem(f"{name} cannot be used: {reason}", "see what the driver says")]
    gates = facts.get("gates")
    if gates is None or gates["state"] in ("not run", "skipped"):
        return []
    if gates["state"] != "completed":
        return [_problem(f"{name}: the self-test did not complete: {reason}", "run python -m strata_ops check again")]
    if not gates["plain"]:
        return [_problem(f"{name} is not used: {facts['why']}", "use the CPU, and report python -m strata_ops parity")]
    wrong = [gate for gate in ("split", "staged", "wide_up", "runtime_geometry", "tiled") if not gates[gate]]
    if wrong:
        return [
            _problem(
                f"{name}: the self-test found {', '.join(wrong)} wrong; {facts['chosen']} runs",
                "report python -m strata_ops evidence",
            )
        ]
    return []


def _device(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": name,
        "arch": facts["arch"],
        "runs": facts["chosen"],
        "why": facts["why"],
        "p4": _p4(name, facts),
    }


def _p4(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    p4 = next(variant for variant in _core.VARIANTS if variant.name == "p4")
    if facts["chosen"] == p4.name:
        return {"runs": True, "why_not": None, "do": None}
    do = None
    if name == "cpu":
        why = "it is a GPU's kernel"
    elif not _core.arch_is_gfx12(facts["arch"]):
        why = f"it is for gfx1200 and gfx1201, and this is {facts['arch']}"
    elif facts["want"] != p4.name:
        why = "nobody asked for it"
        do = f"set {_core.SELECTOR_VARIABLE}={p4.value} before the process starts"
    else:
        why = facts["why"]
        if facts["gates"]["state"] == "skipped":
            do = f"unset {_core.SELFTEST_VARIABLE}"
        elif facts["gates"]["state"] != "completed":
            do = "let the self-test run: a first read, or strata_ops.check()"
    return {"runs": False, "why_not": why, "do": do}


def render(report: dict[str, Any]) -> str:
    """The report of :func:`doctor` as text for people."""
    installed = ", ".join(f"{name} {version or 'none'}" for name, version in report["installed"].items())
    lines = [render_info(report["info"]), "", f"installed: {installed}"]
    for variable in report["environment"]:
        lines.append(f"{variable['name']}={variable['text']!r}: {variable['what'] or 'no variable of ours'}")
    for device in report["devices"]:
        p4 = device["p4"]
        remedy = f"; {p4['do']}" if p4["do"] else ""
        lines.append(f"P4 on {device['device']}: {'runs' if p4['runs'] else 'no, ' + p4['why_not'] + remedy}")
    lines.append("")
    for finding in report["findings"]:
        lines.append(f"{finding['level']}: {finding['what']}" + (f"; {finding['do']}" if finding["do"] else ""))
    problems = sum(finding["level"] == "problem" for finding in report["findings"])
    lines.append("nothing is wrong" if report["ok"] else f"{problems} problem{'s' if problems > 1 else ''}, see above")
    return "\n".join(lines)
