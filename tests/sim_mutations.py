"""Takes one barrier, fence, commit, wait, landing copy, mask or width out of the kernels: which test notices?

    python tests/sim_mutations.py [--only TEXT]

It works on a copy of the sources in a temporary folder, where it builds the simulated cards' tests once and then again
for each occurrence in csrc/gpu. The strict card is asked first, then the fast one. Exit status 1 where something is
noticed by none and has no reason below. Six seconds an occurrence, under three minutes in all.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("CMakeLists.txt", "pyproject.toml", "cmake", "csrc", "tests")
TIMEOUT = 600  # seconds; a mutant that waits for ever is ended by the card itself, long before

# What no test can notice, and why the line stays all the same: (file, text of the line) -> reason.
REASONS: dict[tuple[str, str], str] = {}


class Mutation(NamedTuple):
    file: str
    line: int
    before: str  # the line as it stands
    after: str
    what: str


# (what, pattern, replacement): each match is one mutation.
REMOVALS = (
    ("removed", re.compile(r"\b(?:local_|wave_)?barrier\(\);"), ";"),
    ("removed", re.compile(r"\bfence\(\);"), ";"),
    ("removed", re.compile(r"\bcopy_async_commit\(\);"), ";"),
    ("removed", re.compile(r"\bwait_for_launch_before\(\);"), ";"),
    ("removed", re.compile(r"\bcopy_async_wait<\w+>\(\);"), ";"),
    ("removed", re.compile(r"\b\w*cop(?:y|ies\[i\])\.land\([^;]*\);"), ";"),
    ("removed", re.compile(r"\bcluster_(?:arrive|wait)\(\);"), ";"),
    ("removed", re.compile(r"\b(?:expect_arrivals|wait_arrivals|wait_copies)\([^;]*\);"), ";"),
)
# Where a tree begins, how many lanes a tree spans, and what the vendor header tells a shuffle.
HALVINGS = {
    "csrc/gpu/lanes.cuh": ((re.compile(r"int stage = (\w+) / 2"), r"int stage = \1 / 4"),),
    "csrc/gpu/up.cuh": ((re.compile(r"tree_sum<kRowThreads>"), "tree_sum<kRowThreads / 2>"),),
    "csrc/gpu/stream_up.cuh": ((re.compile(r"tree_sums<kRowThreads>"), "tree_sums<kRowThreads / 2>"),),
    "csrc/gpu/cluster_up.cuh": ((re.compile(r"tree_sums<kRowThreads,"), "tree_sums<kRowThreads / 2,"),),
    "csrc/gpu/cluster_down.cuh": ((re.compile(r"tree_sums<kLanes>"), "tree_sums<kLanes / 2>"),),
    "csrc/gpu/vendor/sim.hpp": (
        (re.compile(r"std::uint64_t\{0xffffffff\}"), "std::uint64_t{0xffff}"),
        (re.compile(r", kLanes\);"), ", kLanes / 2);"),
    ),
}


def mutations() -> list[Mutation]:
    found = []
    for path in sorted((ROOT / "csrc" / "gpu").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in (".cuh", ".cu", ".hpp") or (path.parent.name == "vendor" and path.name != "sim.hpp"):
            continue
        rules = [("halved", *rule) for rule in HALVINGS.get(name, ())]
        rules += REMOVALS if path.name != "sim.hpp" else ()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("//")[0]
            for what, pattern, replacement in rules:
                for match in pattern.finditer(code):
                    after = line[: match.start()] + match.expand(replacement) + line[match.end() :]
                    found.append(Mutation(name, number, line, after, what))
    return found


class Scratch:
    """A copy of the sources with a build of the tests."""

    def __init__(self, folder: Path) -> None:
        self.source, self.build = folder / "source", folder / "build"
        self.source.mkdir()
        for part in PARTS:
            origin = ROOT / part
            if origin.is_dir():
                shutil.copytree(origin, self.source / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(origin, self.source / part)
        command = ["cmake", "-S", self.source, "-B", self.build, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
        command += ["-DSTRATA_CUDA=OFF", "-DSTRATA_HIP=OFF", "-DSTRATA_SIM=ON", "-DSTRATA_TESTS=ON"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"cmake does not configure the copy:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")

    def make(self, target: str) -> str:
        """Builds a test; what the compiler says where it does not."""
        done = subprocess.run(["cmake", "--build", self.build, "--target", target], capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stdout

    def test(self, program: str, *arguments: str) -> str:
        """Runs a test; its first complaint, or nothing where it passes."""
        try:
            done = subprocess.run(
                [self.build / "tests" / "cpp" / program, *arguments], capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return f"did not end in {TIMEOUT} s"
        if done.returncode == 0:
            return ""
        return done.stderr.splitlines()[0] if done.stderr else f"ended with status {done.returncode}"

    def caught_by(self, mutation: Mutation) -> str:
        path = self.source / mutation.file
        original = path.read_text()
        lines = original.splitlines(keepends=True)
        lines[mutation.line - 1] = mutation.after + "\n"
        path.write_text("".join(lines))
        try:
            if complaint := self.make("sim_read_strict"):
                errors = [line for line in complaint.splitlines() if "error:" in line]
                return f"compiler: {errors[0].split('error:')[1].strip() if errors else 'does not build'}"
            if complaint := self.test("sim_read_strict"):
                return f"strict: {sentence(complaint)}"
            self.make("sim_read")
            for lanes in ("32", "64"):
                if complaint := self.test("sim_read", lanes):
                    return f"fast, {lanes} lanes: {sentence(complaint)}"
        finally:
            path.write_text(original)
        return ""


def sentence(complaint: str) -> str:
    """What a CHECK printed, without what it checked."""
    text = complaint.split("report.text: ")[-1].split(", name, first: ")[-1]
    return text.split(" (719): ")[-1].split(" (700): ")[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutations whose file or line contains this")
    arguments = parser.parse_args()
    wanted = [m for m in mutations() if arguments.only in f"{m.file}:{m.line} {m.before}"]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="sim_mutations") as folder:
        scratch = Scratch(Path(folder))
        for program in ("sim_read_strict", "sim_read"):
            if complaint := scratch.make(program):
                raise SystemExit(f"{program} does not build without a mutation:\n{complaint[-3000:]}")
        if complaint := scratch.test("sim_read_strict"):
            raise SystemExit(f"the strict card complains without a mutation: {complaint}")
        for m in wanted:
            verdict = scratch.caught_by(m)
            reason = REASONS.get((m.file, m.before.strip()))
            missed += not verdict and not reason
            verdict = verdict or (f"nothing; stays because {reason}" if reason else "NOTHING")
            print(f"{m.file}:{m.line}  {m.what}  `{m.before.strip()}`\n    {verdict}", flush=True)
    print(f"{len(wanted)} mutations, {missed} noticed by no test and without a reason")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
