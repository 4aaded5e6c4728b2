"""What a call costs beside the read itself: a read of no tokens, of the smallest geometry, in each autograd mode.

  python bench/call_overhead.py
  python bench/call_overhead.py --against ../before     # another built checkout, in turn with this one

Each checkout is timed in processes of its own, which take turns; microseconds a call, the least of all rounds and the
median.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
MODES = ("no_grad", "inference_mode", "grad mode, nothing requires grad")

TIMED = """
import contextlib, json, sys, time
import torch, strata_ops

calls = 20000
def tensors(tokens):
    return (
        torch.zeros(tokens, 1, 32), torch.ones(1, 32), torch.zeros(8, 32).bfloat16(), torch.zeros(32, 8).bfloat16(),
        torch.zeros(1, 32).bfloat16(), torch.zeros(tokens, 32), torch.zeros(tokens, 1),
    )

op = torch.ops.strata.fused_gr_read.default
functions = {"torch.ops": op, "strata_ops.fused_gr_read": strata_ops.fused_gr_read,
             "strata_ops.fused_gr_read_": strata_ops.fused_gr_read_}
modes = dict(zip(json.loads(sys.argv[1]), (torch.no_grad, torch.inference_mode, contextlib.nullcontext)))
times = {}
for mode, entered in modes.items():
    with entered():
        given = tensors(0)
        for name, function in functions.items():
            for _ in range(1000):
                function(*given)
            begin = time.perf_counter()
            for _ in range(calls):
                function(*given)
            times[f"{name}, {mode}"] = (time.perf_counter() - begin) / calls * 1e6
print(json.dumps(times))
"""


def times_of(checkout: Path) -> dict[str, float]:
    """One process's times."""
    command = [sys.executable, "-c", TIMED, json.dumps(MODES)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, with its libraries built")
    parser.add_argument("--rounds", type=int, default=5, help="processes a checkout")
    args = parser.parse_args()
    checkouts = {"here": HERE} | ({"against": args.against.resolve()} if args.against else {})
    rounds = {name: [] for name in checkouts}
    for _ in range(args.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(times_of(checkout))
    print(f"{'us a call: least (median)':62}" + "".join(f"{name:>18}" for name in checkouts))
    for row in rounds["here"][0]:
        cells = []
        for name in checkouts:
            samples = [times[row] for times in rounds[name]]
            cells.append(f"{min(samples):9.2f} ({statistics.median(samples):5.2f})")
        print(f"{row:62}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
