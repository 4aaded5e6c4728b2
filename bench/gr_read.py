"""Time the read: every variant beside PyTorch, with cold weights, and beside the floor measured in the same run.

  python bench/gr_read.py                       # the card where torch has one, else the CPU
  python bench/gr_read.py --device cpu --threads 1,2
  python bench/gr_read.py --tokens 1,2,4,8 --json out.json --plot out.png

bench/README.md says how to read the table.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

import torch

import strata_ops
from strata_ops import debug

sys.path.insert(0, str(Path(__file__).parent))
from peers import overlapping_copy, peers, triton_peers
from timing import measured_bandwidth, spread, time_alone, time_alternating, time_eager, time_graph

WIDTH, STREAMS, RANK = 2560, 4, 320
DEPTH = WIDTH * STREAMS
WEIGHT_BYTES = 2 * (RANK * DEPTH + DEPTH * RANK + STREAMS * DEPTH)  # bf16


def make_weights(sets: int, device: torch.device) -> list[dict]:
    """Weight sets of a checkpoint's magnitudes; together larger than any cache."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape, scale):
        return torch.randn(*shape, generator=generator) * scale

    made = []
    for _ in range(sets):
        weights = {
            "w_norm": 1 + normal(STREAMS, WIDTH, scale=0.1),
            "w_down": normal(RANK, DEPTH, scale=0.02).bfloat16(),
            "w_up": normal(DEPTH, RANK, scale=0.05).bfloat16(),
            "w_inject": normal(STREAMS, DEPTH, scale=0.02).bfloat16(),
        }
        made.append({k: v.to(device) for k, v in weights.items()})
    return made


def make_inputs(tokens: int, device: torch.device, streams: str) -> dict:
    """Activations of one call, with a pending write; streams of "fp32" or "bf16"."""
    generator = torch.Generator().manual_seed(2)
    inputs = {
        "residual": torch.randn(tokens, STREAMS, WIDTH, generator=generator),
        "block_out": torch.randn(tokens, WIDTH, generator=generator) * 0.5,
        "inject_prev": torch.randn(tokens, STREAMS, generator=generator) * 2,
    }
    if streams == "bf16":
        inputs |= {k: inputs[k].bfloat16() for k in ("residual", "block_out")}
    return {k: v.to(device) for k, v in inputs.items()}


def strata_calls(variant: str | None, inputs: dict, sets: list[dict]) -> list:
    """One call a weight set: the op itself, or a forced variant."""
    if variant is None:
        op = torch.ops.strata.fused_gr_read.default
        return [
            lambda w=w: op(
                inputs["residual"], w["w_norm"], w["w_down"], w["w_up"], w["w_inject"], inputs["block_out"],
                inputs["inject_prev"],
            )
            for w in sets
        ]  # fmt: skip
    return [lambda w=w: debug.fused_gr_read(**inputs, **w, variant=variant) for w in sets]


class Progress:
    """One line on the terminal that says what is being timed."""

    def __init__(self):
        self.shown = sys.stderr.isatty()

    def __call__(self, what: str):
        if self.shown:
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def row(name, tokens, mode, samples, floor_us, placement="back_to_back", **more) -> dict:
    """A row of the result; bandwidth counts the weights alone."""
    times = spread(samples)
    return {
        "name": name, "tokens": tokens, "mode": mode, "placement": placement, **times,
        "gbps": WEIGHT_BYTES / times["us_median"] / 1e3, "times_floor": times["us_median"] / floor_us, **more,
    }  # fmt: skip


def alone_placements(args, residual: torch.Tensor, source: torch.Tensor, sets: list[dict]) -> list[tuple]:
    """(name, kernel in front, what runs beside it for each set) of the placements in which no read overlaps another."""
    if not (args.alone or args.prefetch):
        return []
    found = [("alone", lambda: residual.copy_(source), None)]
    if (copy := overlapping_copy()) is not None:
        found.append(("alone_overlapping", lambda: copy(residual, source), None))
    if args.prefetch:
        touch = [lambda w=w: [w[name].view(torch.int32).amax() for name in ("w_down", "w_up")] for w in sets]
        found.append(("alone_prefetched", found[0][1], touch))
    return found


def run_cuda(args, progress) -> dict:
    device = torch.device(args.device)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    progress("measuring the memory's bandwidth")
    bandwidth = measured_bandwidth(device)
    floor_us = WEIGHT_BYTES / bandwidth * 1e6
    sets = make_weights(args.sets or 97, device)
    rows = []
    modes = {"graph": lambda calls: time_graph(calls, args.rounds), "eager": lambda calls: time_eager(calls, 10)}
    for tokens in args.tokens:
        inputs = make_inputs(tokens, device, args.streams)
        source = inputs["residual"].clone()
        contestants = {"strata": strata_calls(None, inputs, sets)}
        contestants |= {v: strata_calls(v, inputs, sets) for v in args.variants or debug.variants(device)}
        if not args.no_peers:
            for peer in peers(not args.no_compile, args.max_autotune) + triton_peers(tokens):
                converted = [peer.arguments(inputs, w) for w in sets]
                contestants[peer.name] = [lambda p=peer, a=a: p.call(*a) for a in converted]
        placements = alone_placements(args, inputs["residual"], source, sets)
        for name, calls in contestants.items():
            for mode in args.modes:
                progress(f"T={tokens} {name} {mode}")
                rows.append(row(name, tokens, mode, modes[mode](calls), floor_us))
            for placement, before, beside in placements:
                progress(f"T={tokens} {name} {placement}")
                samples = time_alone(calls, before, args.rounds, beside)
                rows.append(row(name, tokens, "graph", samples, floor_us, placement))
    name = torch.cuda.get_device_name(device)
    return {"device": name, "floor": {"us": floor_us, "gbps": bandwidth / 1e9}, "rows": rows}


def run_cpu(args, progress) -> dict:
    device = torch.device("cpu")
    sets = make_weights(args.sets or 20, device)
    streams = [[torch.cat([w[k].flatten() for k in ("w_down", "w_up", "w_inject")]).view(torch.float32)] for w in sets]
    rows = []
    floor = None
    for threads in args.threads:
        torch.set_num_threads(threads)
        for tokens in args.tokens:
            inputs = make_inputs(tokens, device, args.streams)
            groups = {"stream": [lambda s=s: s[0].sum() for s in streams], "strata": strata_calls(None, inputs, sets)}
            groups |= {v: strata_calls(v, inputs, sets) for v in args.variants or []}
            if not args.no_peers:
                for peer in peers(compiled=False):
                    converted = [peer.arguments(inputs, w) for w in sets]
                    groups[peer.name] = [lambda p=peer, a=a: p.call(*a) for a in converted]
            progress(f"threads={threads} T={tokens}")
            samples = time_alternating(groups, args.rounds * 3)
            floor_us = spread(samples["stream"])["us_median"]
            floor = floor or floor_us
            rows += [row(name, tokens, "eager", s, floor_us, threads=threads) for name, s in samples.items()]
    return {
        "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "floor": {"us": floor, "gbps": WEIGHT_BYTES / floor / 1e3},
        "rows": rows,
    }


def key_of(r: dict) -> tuple:
    """What a line of the table and of the plot is of."""
    return r["name"], r["placement"], r["mode"], r.get("threads", 0)


def label_of(key: tuple) -> str:
    name, placement, mode, threads = key
    where = "" if placement == "back_to_back" else " " + placement.replace("_", " ")
    return f"{name} {mode}{where}" + (f" {threads} threads" if threads else "")


def print_table(result: dict):
    floor = result["floor"]
    print(f"{result['device']}, torch {result['torch']}: {WEIGHT_BYTES / 1e6:.1f} MB of weights a read, floor "
          f"{floor['us']:.2f} us at {floor['gbps']:.0f} GB/s")  # fmt: skip
    keys = dict.fromkeys(sorted((key_of(r) for r in result["rows"]), key=lambda k: k[1:]))
    tokens = sorted({r["tokens"] for r in result["rows"]})
    cell = {(*key_of(r), r["tokens"]): r for r in result["rows"]}
    print(f"{'us a read (median, x floor)':34}" + "".join(f"{f'T={t}':>18}" for t in tokens))
    for key in keys:
        label = label_of(key)
        cells = [cell.get((*key, t)) for t in tokens]
        print(f"{label:34}" + "".join(
            f"{c['us_median']:10.2f} ({c['times_floor']:4.2f}x)" if c else f"{'-':>18}" for c in cells))  # fmt: skip


def plot(result: dict, path: str):
    """A panel for each placement, mode and number of threads; a line in it for each contestant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    names = list(dict.fromkeys(r["name"] for r in rows))
    colours = dict(zip(names, plt.get_cmap("tab20").colors))
    panels = list(dict.fromkeys(key_of(r)[1:] for r in rows))
    tokens = sorted({r["tokens"] for r in rows})
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(3 + 4.5 * len(panels), 5.5), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, panel in zip(all_axes[0], panels):
        for name in names:
            points = [r for r in rows if key_of(r) == (name, *panel)]
            times = [r["us_median"] for r in points]
            errors = [[r["us_median"] - r["us_p10"] for r in points], [r["us_p90"] - r["us_median"] for r in points]]
            axes.errorbar(
                [r["tokens"] for r in points], times, yerr=errors, marker="o", capsize=3, label=name,
                color=colours[name],
            )  # fmt: skip
        axes.axhline(result["floor"]["us"], color="black", linestyle="--", label="floor: weights once")
        if max(tokens) > 16:
            axes.set(xscale="log", yscale="log")
            axes.minorticks_off()
        else:
            axes.set(ylim=(0, None))
        axes.set(title=label_of(("", *panel)).strip(), xlabel="tokens a read")
        axes.set_xticks(tokens, [str(t) for t in tokens])
    all_axes[0][0].set(ylabel="us a read (median, p10 to p90)")
    figure.suptitle(result["device"])
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=120)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=numbers, default=[1, 2, 4, 8], help="comma separated (default 1,2,4,8)")
    parser.add_argument("--variants", type=lambda t: t.split(","), help="forced variants (default: all on a card)")
    parser.add_argument("--modes", type=lambda t: t.split(","), default=["graph"], help="graph, eager (card only)")
    parser.add_argument("--alone", action="store_true", help="also each read behind a small kernel (card only)")
    parser.add_argument("--prefetch", action="store_true", help="alone, and with the weights read beside that kernel")
    parser.add_argument("--threads", type=numbers, default=[torch.get_num_threads()], help="CPU only")
    parser.add_argument("--streams", choices=["fp32", "bf16"], default="fp32", help="of residual, block_out")
    parser.add_argument("--sets", type=int, help="weight sets in turn (default 97 on a card, 20 on the CPU)")
    parser.add_argument("--rounds", type=int, default=40, help="samples a row (three times as many on the CPU)")
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch out")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--max-autotune", action="store_true", help="let torch.compile try kernels (minutes a row)")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--plot", help="write a picture here (PNG)")
    args = parser.parse_args()

    progress = Progress()
    result = (run_cpu if args.device == "cpu" else run_cuda)(args, progress)
    progress("")
    command = ["python", "bench/gr_read.py", *(Path(word).name if "/" in word else word for word in sys.argv[1:])]
    result = {"torch": torch.__version__, "strata_ops": strata_ops.__version__, "command": command, **result}
    print_table(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
