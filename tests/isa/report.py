"""`make hip-report`: registers, spills and schedule of every kernel on every AMD target by clang and by LLVM 24, as a
table and as build/hip_report.json. test_hip_report.py holds the bounds.

`lds_bytes` is what a launch of `tokens` tokens takes on a card with 64 KiB; `waves_per_simd` is what the registers
allow; `prefetch` has the least of its group: fp32 operations in the steady loop between a request and the first wait
for it.
"""

import argparse
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import codegen  # noqa: E402
from codegen import COMPILERS, ROOT, Unavailable  # noqa: E402
from schedule import Kernel, parse, schedule  # noqa: E402

LAUNCH = ROOT / "csrc/gpu/launch.cu"
MORE = HERE / "instances.cu"
TILE_BYTES = 1280 * 4  # of one token
ROW_OPERATIONS = 5 * 9  # fp32 operations of a tile's dot for one token: five chunks of a multiply, seven fmaf, an add
MOST_TOKENS = 8
GROUPS = ("weights", "half_a", "half_b")


def variant(name: str) -> str:
    for part, answer in (
        ("register_half", "p4"), ("staged", "staged"), ("down_plain", "plain, split"), ("runtime", "runtime_geometry"),
        ("stream", "stream"), ("ByQuarters", "stream"), ("tiled", "tiled"), ("ByTiledLanes", "tiled"),
        ("norm_kernel<4", "plain"), ("norm_kernel<1", "split, staged, p4"),
    ):  # fmt: skip
        if part in name:
            return answer
    return "all"


def exact_tokens(name: str) -> int | None:
    match = re.search(r"<(\d+), true>", name)
    return int(match[1]) if match else None


def dot_operations(name: str) -> int:
    """fp32 operations of one tile in the loop of a staged or P4 instance."""
    return ROW_OPERATIONS * (exact_tokens(name) or MOST_TOKENS)


def waves_per_simd(target: str, vgprs: int) -> int:
    total, step, most = (512, 8, 8) if target.startswith("gfx9") else (1536, 24, 16)
    return min(most, total // (-(-max(vgprs, 1) // step) * step))


def row(target: str, compiler: str, kernel: Kernel, dispatched: bool) -> dict:
    found = schedule(kernel)
    facts = kernel.facts
    buffers = 2 if variant(kernel.name) in ("staged", "p4") else 1 if "down_plain" in kernel.name else 0
    limit = 64 * 1024 // (buffers * TILE_BYTES) if buffers else MOST_TOKENS
    tokens = exact_tokens(kernel.name) or min(limit, MOST_TOKENS)
    least = {}
    for fetch in found.prefetches:
        if fetch.group in GROUPS:
            least[fetch.group] = min(fetch.fp32, least.get(fetch.group, fetch.fp32))
    overlapping = variant(kernel.name) in ("staged", "p4")
    return {
        "target": target,
        "compiler": compiler,
        "name": kernel.name,
        "variant": variant(kernel.name),
        "tokens": tokens,
        "dispatched": dispatched and (variant(kernel.name) != "p4" or target in ("gfx1200", "gfx1201")),
        "vgprs": facts["vgpr_count"],
        "sgprs": facts["sgpr_count"],
        "lds_bytes": facts["group_segment_fixed_size"] + buffers * tokens * TILE_BYTES,
        "scratch_bytes": facts["private_segment_fixed_size"],
        "vgpr_spills": facts["vgpr_spill_count"],
        "waves_per_simd": waves_per_simd(target, facts["vgpr_count"]),
        "loop_barriers": found.barriers,
        "loop_barriers_waiting_for_loads": found.barriers_waiting,
        "prefetch": [
            {"group": group, "fp32_ops_before_first_wait": least[group]}
            for group in GROUPS
            if overlapping and group in least
        ],
    }


def report(targets: list[str], compilers: list[str]) -> dict:
    versions = {"clang": f"{codegen.hip().version}, HIP {codegen.hip().headers} headers"}
    if "llvm24" in compilers:
        versions["llvm24"] = "LLVM 24 in Triton's library"
    rows = []
    for target in targets:
        for compiler in compilers:
            for source in (LAUNCH, MORE):
                kernels = parse(codegen.assembly(source, target, compiler))
                rows += [row(target, compiler, kernel, source == LAUNCH) for kernel in kernels]
    return {"compilers": {name: versions[name] for name in compilers}, "kernels": rows}


def table(result: dict) -> str:
    compilers = list(result["compilers"])
    lines = [f"{name}: {text}" for name, text in result["compilers"].items()]
    lines.append("cells: VGPRs and waves a SIMD; ! is scratch or a spill; ( ) is not dispatched")
    lines.append(
        "in front, staged and P4: fp32 operations before the first wait for weights/half A/half B, and barriers"
    )
    lines.append("in the steady loop that wait for a load, of all")
    for target in dict.fromkeys(row["target"] for row in result["kernels"]):
        lines += ["", f"{target:44s}" + "".join(f"{name:>34s}" for name in compilers)]
        rows = [row for row in result["kernels"] if row["target"] == target]
        for name in sorted({row["name"] for row in rows}):
            cells = [next(row for row in rows if (row["name"], row["compiler"]) == (name, c)) for c in compilers]
            label = name if cells[0]["dispatched"] else f"({name})"
            lines.append(f"{label:44s}" + "".join(f"{_cell(cell):>34s}" for cell in cells))
    return "\n".join(lines)


def _cell(row: dict) -> str:
    bad = "!" if row["scratch_bytes"] or row["vgpr_spills"] else ""
    text = f"{bad}{row['vgprs']} {row['waves_per_simd']:2d}"
    if row["prefetch"]:
        counts = "/".join(str(fetch["fp32_ops_before_first_wait"]) for fetch in row["prefetch"])
        text = f"{counts:>14s}  {row['loop_barriers_waiting_for_loads']}/{row['loop_barriers']} {text:>8s}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/hip_report.json")
    parser.add_argument("--target", action="append", help="repeatable; default: every target that the compiler knows")
    parser.add_argument("--compiler", action="append", choices=COMPILERS, help="repeatable; default: both")
    args = parser.parse_args()
    try:
        targets = args.target or codegen.hip_facts.archs(codegen.hip())[0]
        result = report(targets, args.compiler or list(COMPILERS))
    except Unavailable as reason:
        print(f"hip-report: {reason}", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
