"""Patch a Transformers model: the same tokens, its residual streams read by the op.

  python examples/patch_transformers.py
  python examples/patch_transformers.py --device cuda --dtype bfloat16 --tokens 256

The model is a real one with random weights, 4 layers of streams of 2560. With a checkpoint it would be
Qwen4ExpForCausalLM.from_pretrained(path, dtype=torch.bfloat16).
"""

import argparse
import time

import torch

from strata_ops.integrations.tiny_qwen4_exp import tiny_qwen4_exp
from strata_ops.integrations.transformers import patch, unpatch


def timed_generate(model, prompt, tokens):
    """Greedy tokens, and the milliseconds that one took."""
    start = time.perf_counter()
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    text = text[0, prompt.shape[1] :].tolist()
    return text, (time.perf_counter() - start) * 1e3 / tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate (default 64)")
    args = parser.parse_args()

    model = tiny_qwen4_exp().to(args.device, getattr(torch, args.dtype))
    prompt = torch.arange(1, 13, device=args.device).unsqueeze(0)
    timed_generate(model, prompt, 4)  # warm up

    plain, plain_ms = timed_generate(model, prompt, args.tokens)
    patch(model)  # prefill="library" would leave long prompts to matrix products of the library
    timed_generate(model, prompt, 4)
    patched, patched_ms = timed_generate(model, prompt, args.tokens)
    unpatch(model)

    print("tokens:", *patched[:16], "..." if args.tokens > 16 else "")
    print(f"{plain_ms:.2f} ms a token unpatched, {patched_ms:.2f} patched")
    differing = [i for i, (a, b) in enumerate(zip(plain, patched, strict=True)) if a != b]
    # In bfloat16 the two round differently, so where two tokens are as likely as each other, either may be taken.
    print(f"tokens differ from number {differing[0] + 1} on" if differing else f"all {args.tokens} tokens are equal")


if __name__ == "__main__":
    main()
