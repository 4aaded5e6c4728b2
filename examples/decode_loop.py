"""A decode loop with static buffers: on a GPU captured once in a CUDA graph, and replayed for every token.

  python examples/decode_loop.py
  python examples/decode_loop.py --device cuda --reads 97 --tokens 256

The model around the reads is a toy: one matrix stands for every block, and a token depends on the one before alone.
"""

import argparse
import time

import torch

from strata_ops import fused_gr_read, fused_gr_read_out
from toy import HC, Toy


def step(model: Toy, token: torch.Tensor, buffers=None):
    """From `token` to the next one, written in its place. Without buffers the reads make their own, and return them."""
    streams, block_out, inject, used = model.embedding[token].unsqueeze(-2).repeat(1, HC, 1), None, None, []
    for i, weights in enumerate(model.reads):
        inputs = (streams, *weights, block_out, inject)  # the write of the block before comes along
        read = fused_gr_read(*inputs) if buffers is None else fused_gr_read_out(*inputs, out=buffers[i])
        streams, inject = streams if read.residual_out is None else read.residual_out, read.inject
        block_out = torch.tanh(read.mixed @ model.block)
        used.append(read)
    token.copy_((read.mixed @ model.head).argmax(-1))
    return used


def decode(advance, token: torch.Tensor, tokens: int):
    """The text from token 1 on, and the microseconds a token took."""
    token.fill_(1)
    text = torch.empty(tokens, *token.shape, dtype=token.dtype, device=token.device)
    start = time.perf_counter()
    for i in range(tokens):
        advance()
        text[i] = token
    text = text.flatten().tolist()  # waits for the device
    return text, (time.perf_counter() - start) * 1e6 / tokens


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--reads", type=int, default=8, help="reads a token (default 8; the model has 97)")
    parser.add_argument("--tokens", type=int, default=32, help="how many to decode (default 32)")
    args = parser.parse_args()

    model = Toy(args.reads, args.device, block_gain=2)
    token = torch.ones(1, dtype=torch.long, device=args.device)
    buffers = step(model, token)  # the first call also runs the GPU's self-test, which no capture may hold
    text, micros = decode(lambda: step(model, token, buffers), token, args.tokens)
    print(f"plain loop: {micros:.0f} us a token:", *text[:12], "...")
    if torch.device(args.device).type != "cuda":
        print("no CUDA graph on the CPU: the plain loop is all there is")
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, token, buffers)
    replayed, micros = decode(graph.replay, token, args.tokens)
    print(f"CUDA graph: {micros:.0f} us a token:", *replayed[:12], "...")
    if replayed != text:
        raise SystemExit("the graph gave other tokens")
    print(f"all {args.tokens} tokens are equal")


if __name__ == "__main__":
    main()
