"""What CMake and setup.py must know of the installed torch, one `key=value` a line. Reads files and imports nothing, so
it also answers where torch itself would not load."""

import importlib.util
import runpy
from pathlib import Path

NO_TORCH = (
    "the build takes the torch that you use, and this Python has none: install torch, then run "
    "`pip install --no-build-isolation .` (without that option pip builds where your torch is not seen)"
)


def torch_facts() -> dict[str, str]:
    """Raises SystemExit with one line where there is no torch, or one that is too old."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(NO_TORCH)
    root = Path(spec.origin).resolve().parent
    version = runpy.run_path(str(root / "version.py"))
    major, minor = (int(part) for part in version["__version__"].split(".")[:2])
    if (major, minor) < (2, 11):
        raise SystemExit(f"torch 2.11 or later is needed, and this Python has {version['__version__']}")
    return {
        "version": version["__version__"],
        "cuda": version.get("cuda") or "",
        "hip": version.get("hip") or "",
        "include": str(root / "include"),
        "library": str(root / "lib" / "libtorch_cpu.so"),
    }


if __name__ == "__main__":
    for key, value in torch_facts().items():
        print(f"{key}={value}")
