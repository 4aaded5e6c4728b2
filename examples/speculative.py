"""Speculative decoding in windows of T = 4: three drafted tokens are checked by one read of each block's weights.

  python examples/speculative.py
  python examples/speculative.py --device cuda --tokens 256

A read gives a token the same bits alone and in a window, so what is accepted is what plain decoding would have written:
not nearly, but always. The model around the reads is a toy: the four streams start as the last four tokens, and one
matrix stands for every block. The draft is the same model without its middle: the first read and the last.
"""

import argparse

import torch

from strata_ops import fused_gr_read
from toy import HC, Toy

WINDOW = 4


def rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x @ weights, row by row: a library's product of four rows may round otherwise than four products of one."""
    return torch.cat([row @ weights for row in x.split(1)])


def next_tokens(model: Toy, text: list[int], positions: int, reads: list) -> list[int]:
    """What follows each of the last `positions` tokens of `text`, in one pass over the reads' weights."""
    ends = range(len(text) - positions + 1, len(text) + 1)
    contexts = torch.tensor([text[end - HC : end] for end in ends], device=model.embedding.device)
    streams, block_out, inject = model.embedding[contexts], None, None
    for weights in reads:
        read = fused_gr_read(streams, *weights, block_out, inject)
        streams, inject = streams if read.residual_out is None else read.residual_out, read.inject
        block_out = torch.tanh(rows(read.mixed, model.block))
    return rows(read.mixed, model.head).argmax(-1).tolist()


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--reads", type=int, default=8, help="reads a token (default 8; the model has 97)")
    parser.add_argument("--tokens", type=int, default=32, help="how many to decode (default 32)")
    args = parser.parse_args()

    model, start = Toy(args.reads, args.device, block_gain=0.25), list(range(1, HC + 1))
    plain = list(start)
    while len(plain) < HC + args.tokens:
        plain += next_tokens(model, plain, 1, model.reads)

    draft = [model.reads[0], model.reads[-1]]
    text, passes = list(start), 0
    while len(text) < HC + args.tokens:
        drafted = list(text)
        for _ in range(WINDOW - 1):
            drafted += next_tokens(model, drafted, 1, draft)
        wanted = next_tokens(model, drafted, WINDOW, model.reads)
        passes += 1
        accepted = 0
        while accepted < WINDOW - 1 and drafted[len(text) + accepted] == wanted[accepted]:
            accepted += 1
        text += wanted[: accepted + 1]  # the drafted tokens that were right, and the one that follows them
    text = text[: HC + args.tokens]

    print("tokens:", *text[HC : HC + 16], "...")
    print(f"{args.tokens} tokens in {passes} passes of {WINDOW}: {args.tokens / passes:.2f} a pass")
    if text != plain:
        raise SystemExit("plain decoding gave other tokens")
    print("all are plain decoding's")


if __name__ == "__main__":
    main()
