"""Time the reads of a patched Transformers model beside the unpatched model's, and compare what the two generate.

  python bench/model.py                        # the card where torch has one, else the CPU
  python bench/model.py --device cuda --dtype bfloat16 --tokens 1,2,4,8,512 --json out.json
  python bench/model.py --no-reads --steps 512

bench/README.md says how to read what it prints.
"""

import argparse
import functools
import json
import os
import platform
import sys
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

import strata_ops
from strata_ops.integrations.tiny_qwen4_exp import tiny_qwen4_exp
from strata_ops.integrations.transformers import patch

sys.path.insert(0, str(Path(__file__).parent))
from timing import spread, time_alternating, time_eager, time_graph

TOLERANCE = 2.0**-18  # of float32 logits, as a part of the largest; tests/test_transformers.py holds the same
# Every token goes to all experts and looks at all others: nothing is chosen by rank, so rounding shows as what it is.
# In the model as it is, a rounding error that moves a token to another expert hides all others.
SMOOTH = {"num_experts": 2, "num_experts_per_tok": 2, "indexer_budget": 4096}


class Reads(nn.Module):
    """The gated residuals of a model of some layers, with the layers' own code between them and without the blocks."""

    def __init__(self, reads: list[nn.Module]):
        super().__init__()
        self.reads = nn.ModuleList(reads)

    def forward(self, hidden_states: torch.Tensor, block_out: torch.Tensor) -> torch.Tensor:
        for read in self.reads[:-1]:
            _, hyper_input, injection_weights = read(hidden_states)
            injection = block_out.unsqueeze(-2) * injection_weights.unsqueeze(-1)
            hidden_states = hyper_input + injection.flatten(-2)
        return self.reads[-1](hidden_states)


def make_reads(layers: int, device: str, dtype: torch.dtype) -> list[nn.Module]:
    """Random weights, in float32 too such as bf16 holds."""
    torch.manual_seed(0)
    config = Qwen4ExpTextConfig(hidden_size=2560)
    with torch.device(device):
        reads = [Qwen4ExpTextGatedResidual(config, use_combine=i < 2 * layers) for i in range(2 * layers + 1)]
    return [read.bfloat16().to(dtype) for read in reads]


@torch.no_grad()
def time_reads(args) -> list[dict]:
    """Microseconds that all reads of a forward pass take, by the number of tokens, for each way of reading."""
    dtype, cuda = getattr(torch, args.dtype), torch.device(args.device).type == "cuda"
    reads = make_reads(args.layers or (48 if cuda else 6), args.device, dtype)
    ways = {
        "unpatched": Reads(reads),
        "patched": patch(Reads(reads)),
        "patched, prefill=library": patch(Reads(reads), prefill="library"),
    }
    rows = []
    for tokens in args.tokens:
        streams = torch.randn(1, tokens, 4 * 2560, device=args.device, dtype=dtype)
        block_out = torch.randn(1, tokens, 2560, device=args.device, dtype=dtype)
        calls = {name: functools.partial(way, streams, block_out) for name, way in ways.items()}
        if tokens <= 8:
            del calls["patched, prefill=library"]  # is the same
        if cuda:
            timed = {("graph", name): time_graph([call], args.rounds) for name, call in calls.items()}
            timed |= {("eager", name): time_eager([call], args.rounds) for name, call in calls.items()}
        else:
            by_name = time_alternating({name: [call] for name, call in calls.items()}, args.rounds)
            timed = {("eager", name): samples for name, samples in by_name.items()}
        for (mode, name), samples in timed.items():
            times = spread(samples)
            rows.append({
                "name": name, "mode": mode, "tokens": tokens, "reads": len(reads), "dtype": args.dtype, **times,
                "us_per_token": times["us_median"] / tokens, "us_per_read": times["us_median"] / len(reads),
            })  # fmt: skip
    return rows


def greedy(model, prompt, steps: int, cache: str | None) -> torch.Tensor:
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=steps, do_sample=False,
        cache_implementation=cache, disable_compile=True,
    )  # fmt: skip
    return tokens[0, prompt.shape[1] :]


def first_difference(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """The first step at which two texts differ, counted from 1."""
    different = (a != b).nonzero()
    return different[0].item() + 1 if len(different) else None


@torch.no_grad()
def compare_generate(args, dtype: torch.dtype, cache: str | None = None, smooth: bool = False) -> dict:
    """What a tiny model writes, patched and not, and the logits over what the unpatched one wrote.

    The judge is the same model in float64, whose norms Transformers takes in float32.
    """
    prompt = torch.randint(1, 1024, (1, 12), generator=torch.Generator().manual_seed(1)).to(args.device)
    config = {"layers": 4, "max_position_embeddings": args.steps + 64, **(SMOOTH if smooth else {})}
    model = tiny_qwen4_exp(args.hidden_size, **config).to(args.device, dtype)
    judge = tiny_qwen4_exp(args.hidden_size, **config).to(args.device).double()
    judge.set_experts_implementation("eager")
    judge.load_state_dict(model.state_dict())

    plain = greedy(model, prompt, args.steps, cache)
    sequence = torch.cat([prompt[0], plain]).unsqueeze(0)
    truth, theirs = judge(sequence).logits[0], model(sequence).logits[0].double()
    patched = greedy(patch(model), prompt, args.steps, cache)
    ours = model(sequence).logits[0].double()

    step = first_difference(plain, patched)
    result = {
        "dtype": str(dtype)[6:], "cache": cache or "dynamic", "smooth": smooth, "steps": args.steps,
        "first_difference": step,
        "equal_tokens": int((plain == patched).sum()) if step is None else step - 1,
        "largest_logit": theirs.abs().max().item(),
        "patched_to_unpatched_max": (ours - theirs).abs().max().item(),
        "patched_to_float64_mean": (ours - truth).abs().mean().item(),
        "unpatched_to_float64_mean": (theirs - truth).abs().mean().item(),
    }  # fmt: skip
    result["relative_max"] = result["patched_to_unpatched_max"] / result["largest_logit"]
    if step is not None:
        at = prompt.shape[1] + step - 2  # the position whose logits chose that token
        choice = [plain[step - 1], patched[step - 1]]
        result["at_first_difference"] = {
            "unpatched_prefers_its_token_by": (theirs[at, choice[0]] - theirs[at, choice[1]]).item(),
            "float64_prefers_the_unpatched_token_by": (truth[at, choice[0]] - truth[at, choice[1]]).item(),
            "patched_to_unpatched_max": (ours[at] - theirs[at]).abs().max().item(),
        }
    return result


def print_reads(rows: list[dict]):
    for row in rows:
        print(f"T={row['tokens']:<5}{row['mode']:6} {row['name']:26}{row['us_per_token']:10.1f} us a token "
              f"({row['us_p10'] / row['tokens']:.1f} to {row['us_p90'] / row['tokens']:.1f}), "
              f"{row['us_per_read']:.2f} us a read of {row['reads']}")  # fmt: skip


def print_generate(row: dict):
    same = "all equal" if row["first_difference"] is None else f"first difference at step {row['first_difference']}"
    kind = ", nothing chosen by rank" if row["smooth"] else ""
    print(f"{row['dtype']}, {row['cache']} cache{kind}: {row['steps']} steps, {same}")
    print(f"    logits at most {row['patched_to_unpatched_max']:.2e} apart, {row['relative_max']:.2e} of the largest")
    print(f"    mean distance of the logits to float64: patched {row['patched_to_float64_mean']:.2e}, "
          f"unpatched {row['unpatched_to_float64_mean']:.2e}")  # fmt: skip
    for name, value in row.get("at_first_difference", {}).items():
        print(f"    {name.replace('_', ' ')}: {value:.3e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="of the timed reads")
    parser.add_argument("--tokens", type=lambda t: [int(n) for n in t.split(",")], default=[1, 2, 4, 8],
                        help="comma separated (default 1,2,4,8)")  # fmt: skip
    parser.add_argument("--layers", type=int, help="of the timed reads, two a layer (default 48 on a card, else 6)")
    parser.add_argument("--rounds", type=int, default=30, help="samples a row (default 30)")
    parser.add_argument("--steps", type=int, default=256, help="tokens to generate (default 256)")
    parser.add_argument("--hidden-size", type=int, default=2560, help="of the model that generates (default 2560)")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--no-reads", action="store_true", help="leave the times out")
    parser.add_argument("--no-generate", action="store_true", help="leave the comparison out")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    cuda = torch.device(args.device).type == "cuda"
    here = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    device = torch.cuda.get_device_name(args.device) if cuda else here
    result = {
        "device": device, "torch": torch.__version__, "transformers": transformers.__version__,
        "strata_ops": strata_ops.__version__, "tolerance": TOLERANCE,
        "command": ["python", "bench/model.py", *(Path(w).name if "/" in w else w for w in sys.argv[1:])],
    }  # fmt: skip
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}")
    ok = True
    if not args.no_reads:
        result["reads"] = time_reads(args)
        print_reads(result["reads"])
    if not args.no_generate:
        result["generate"] = []
        fp32, bf16 = torch.float32, torch.bfloat16
        for how in ((fp32,), (fp32, "static"), (bf16,), (bf16, "static"), (bf16, None, True)):
            row = compare_generate(args, *how)
            result["generate"].append(row)
            print_generate(row)
            if row["dtype"] == "float32":
                ok = ok and row["first_difference"] is None and row["relative_max"] <= TOLERANCE
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if not ok:
        raise SystemExit("float32: tokens differ, or logits by more than the tolerance")


if __name__ == "__main__":
    main()
