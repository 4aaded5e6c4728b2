"""Puts Python's headers into .venv where the system came without them: Debian keeps them in a package of their own,
which is unpacked here, not installed. Run by .venv's Python; does nothing where there are headers."""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path


def main() -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    ours = Path(sys.prefix) / "include" / version
    if any((Path(folder) / "Python.h").exists() for folder in (sysconfig.get_path("include"), ours)):
        return
    package = f"lib{version}-dev"
    print(f"setup: this Python has no headers; unpacking those of Debian's {package} into .venv", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
            subprocess.run(["dpkg-deb", "-x", next(folder.glob("*.deb")), "unpacked"], cwd=folder, check=True)
        except (OSError, subprocess.CalledProcessError):
            raise SystemExit(f"the headers of {sys.executable} are missing: install Debian's python3-dev") from None
        shutil.copytree(folder / "unpacked/usr/include" / version, ours, dirs_exist_ok=True)
        # The one that says what the machine is like lies beside, for each kind of machine.
        shutil.copy(next((folder / "unpacked/usr/include").glob(f"*/{version}/pyconfig.h")), ours / "pyconfig.h")


if __name__ == "__main__":
    main()
