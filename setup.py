"""Packaging: setuptools for the Python files, CMake (CMakeLists.txt) for what is compiled."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cmake"))
from torch_facts import torch_facts  # noqa: E402


class CMakeBuild(build_ext):
    def run(self) -> None:
        package = ROOT / "strata_ops" if self.inplace else Path(self.build_lib).resolve() / "strata_ops"
        scripts = sysconfig.get_path("scripts")
        cmake = shutil.which("cmake", path=scripts + os.pathsep + os.environ.get("PATH", ""))
        if cmake is None:
            raise SystemExit("strata_ops: CMake builds it, and is missing: pip install cmake ninja pybind11")
        ninja = shutil.which("ninja", path=scripts + os.pathsep + os.environ.get("PATH", ""))
        configure = [cmake, "-S", str(ROOT), "-B", self.build_temp, f"-DPython_EXECUTABLE={sys.executable}"]
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        configure += [f"-D{name}={os.environ.get(name, 'AUTO')}" for name in ("STRATA_CUDA", "STRATA_HIP")]
        # A library of an earlier build that this one leaves out must not be packed.
        shutil.rmtree(package / "lib", ignore_errors=True)
        for command in (
            configure,
            [cmake, "--build", self.build_temp, "--parallel"],
            [cmake, "--install", self.build_temp, "--prefix", str(package)],
        ):
            if subprocess.run(command).returncode:
                raise SystemExit("strata_ops: not built, for the reason above")


# Said before pip goes and fetches a torch of its own choice. An sdist needs no torch.
if {"dist_info", "bdist_wheel", "build_ext", "develop", "editable_wheel", "install"} & set(sys.argv):
    try:
        torch_facts()
    except SystemExit as stop:
        raise SystemExit(f"strata_ops: {stop}") from None

setup(ext_modules=[Extension("strata_ops._core", sources=[])], cmdclass={"build_ext": CMakeBuild})
