"""Loads the backend libraries that fit the installed torch, and remembers why others are not loaded.

The build of torch decides (`torch.version.cuda`, `torch.version.hip`), never the presence of a card, and loading
initialises no GPU. Without a GPU library the CPU works all the same.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

OLDEST_TORCH = (2, 11)


def _fail(reason: str) -> NoReturn:
    """Nothing works. An ImportError, which `python -m strata_ops` says in one line."""
    text = f"strata_ops: {reason}"
    if ("-m", "strata_ops") in pairwise(sys.orig_argv):
        print(text, file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(text)


REBUILD = "build it for this Python and torch, with `make build` or `pip install --no-build-isolation .` in its source"

try:
    import strata_ops._core as _core  # the plain form of it would not tell the reason
except ImportError as error:
    _fail(f"{error}; {REBUILD}")


class Library(NamedTuple):
    name: str  # "cpu", "cuda" or "hip"
    path: Path
    loaded: bool
    reason: str  # why it is not loaded; empty where it is


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _why_not_for_this_torch(name: str) -> str:
    if name == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if name == "hip" and torch.version.hip is None:
        return f"torch {torch.__version__} is not a ROCm build"
    return ""


def _load(name: str) -> Library:
    path = Path(__file__).parent / "lib" / f"libstrata_{name}.so"
    reason = _why_not_for_this_torch(name)
    if not reason and not path.exists():
        reason = f"{path.name} was not built"
    if not reason:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            reason = f"{path.name} does not load: {str(error).splitlines()[0]}"
    return Library(name, path, not reason, reason)


def _load_all() -> dict[str, Library]:
    if _torch_version() < OLDEST_TORCH:
        _fail(f"torch {'.'.join(map(str, OLDEST_TORCH))} or later is needed, not {torch.__version__}; upgrade torch")
    cpu = _load("cpu")  # first: it defines the schemas that the others register kernels for
    if not cpu.loaded:
        _fail(f"{cpu.reason}; {REBUILD}")
    return {library.name: library for library in (cpu, _load("cuda"), _load("hip"))}


LIBRARIES: dict[str, Library] = _load_all()


def why_no_kernels(device: torch.device) -> str:
    """Why the ops have no kernels for this device, with a remedy; empty where they have them."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"strata_ops runs on the CPU and on CUDA and ROCm GPUs, not on {device}; move the tensors"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build; install a CUDA or ROCm build, or use the CPU"
    library = LIBRARIES["cuda" if torch.version.hip is None else "hip"]
    if library.loaded:
        return ""
    return f"no kernels for {device}: {library.reason}; build strata_ops again with that library, or use the CPU"


def backend_of(device: torch.device | str) -> _core.Backend:
    """The backend that serves a device. RuntimeError, in one line, where there is none."""
    device = torch.device(device)
    if reason := why_no_kernels(device):
        raise RuntimeError(reason)
    name = "cpu" if device.type == "cpu" else "hip" if torch.version.hip is not None else "cuda"
    backend = _core.load_backend(str(LIBRARIES[name].path))
    count = backend.device_count()
    if (device.index or 0) >= count:
        raise RuntimeError(f"there is no device {device}, only {count} of that kind; see python -m strata_ops info")
    return backend
