"""What runs here and why: versions, backends, devices, the variant that each device uses."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from . import _core, cards
from ._libraries import LIBRARIES, Library


def info(card: str | None = None) -> dict[str, Any]:
    """Everything that `python -m strata_ops info --json` prints. Uses the devices that it describes. With a simulated
    `card`, that is the only backend."""
    from . import __version__

    return {
        "strata_ops": __version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "python": platform.python_version(),
        "arithmetic_version": _core.ARITHMETIC_VERSION,
        "backend_abi": _core.BACKEND_ABI,
        "model_geometry": list(_core.MODEL_GEOMETRY),
        "selector": {
            "variable": _core.SELECTOR_VARIABLE,
            "text": os.environ.get(_core.SELECTOR_VARIABLE),
            "values": _core.SELECTOR_VALUES,
        },
        "backends": [_backend(library) for library in LIBRARIES.values()] if card is None else [_card(card)],
    }


def _card(name: str) -> dict[str, Any]:
    card = cards.open_card(name)
    return {
        "name": "sim",
        "loaded": True,
        "reason": None,
        "built_for": card.built_for,
        "variants": card.variants,
        "devices": [card.describe()],
        "no_devices": None,
    }


def _backend(library: Library) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": library.name, "loaded": library.loaded, "reason": library.reason or None}
    if not library.loaded:
        return entry
    try:
        backend = _core.load_backend(str(library.path))
    except RuntimeError as error:
        return entry | {"reason": str(error)}
    entry |= {
        "path": str(library.path),
        "built_for": backend.built_for,
        "variants": backend.variants,
        "devices": [],
        "no_devices": None,
    }
    try:
        count = backend.device_count()
    except RuntimeError as error:
        return entry | {"no_devices": str(error)}
    entry["devices"] = [_device(backend, index) for index in range(count)]
    return entry


def _device(backend: _core.Backend, index: int) -> dict[str, Any]:
    try:
        return backend.describe(index)
    except RuntimeError as error:
        return {"index": index, "error": str(error)}


def render(report: dict[str, Any]) -> str:
    """The report as text for people."""
    selector = report["selector"]
    gpu = f"CUDA {report['torch_cuda']}" if report["torch_cuda"] else None
    gpu = f"ROCm {report['torch_hip']}" if report["torch_hip"] else gpu
    lines = [
        f"strata_ops {report['strata_ops']}, arithmetic contract version {report['arithmetic_version']}",
        f"torch {report['torch']} ({gpu or 'CPU only'}), Python {report['python']}",
        f"{selector['variable']} is {'unset' if selector['text'] is None else repr(selector['text'])} now; it takes "
        f"{selector['values']} and is read once, when a GPU is first used",
    ]
    for backend in report["backends"]:
        lines.append("")
        if "built_for" not in backend:
            state = "loaded, but" if backend["loaded"] else "not loaded:"
            lines.append(f"{backend['name']}: {state} {backend['reason']}")
            continue
        lines.append(f"{backend['name']}: built for {backend['built_for']}; variants {', '.join(backend['variants'])}")
        if backend["no_devices"]:
            lines.append(f"  no devices: {backend['no_devices']}")
        for device in backend["devices"]:
            lines += _render_device(backend["name"], device)
    return "\n".join(lines)


def _render_device(backend: str, device: dict[str, Any]) -> list[str]:
    if "error" in device:
        return [f"  device {device['index']}: {device['error']}"]
    facts = [device["arch"]]
    if backend == "cpu":
        facts.append(f"{device['compute_units']} threads")
    else:
        facts.append(f"{device['compute_units']} compute units")
        facts.append(f"{device['wave_width']}-lane waves")
        facts.append(f"{device['shared_bytes'] // 1024} KiB of shared memory a block")
    lines = [f"  device {device['index']}: {device['name'] or 'unnamed'} ({', '.join(facts)})"]
    asked = f"asked for {device['want']}, " if device["want"] else ""
    lines.append(f"    {asked}runs {device['chosen']}: {device['why']}")
    return lines
