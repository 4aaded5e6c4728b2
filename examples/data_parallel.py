"""Data-parallel training of a stack of gated-residual reads: each process has all weights and a share of the tokens.

    torchrun --nproc-per-node 2 examples/data_parallel.py    # two processes on this machine, with a GPU each if any
    python examples/data_parallel.py                         # one process, the same losses

The weights are kept and updated in fp32 and rounded to bf16 for each read, as the op takes them. Gradients are averaged
between the processes by DistributedDataParallel. Without gradients there is nothing to say between processes: a read
then needs no torch.distributed at all.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import strata_ops

N, HC, LR = 256, 4, 32  # of the model: 2560, 4, 320
LAYERS, TOKENS, STEPS = 2, 8, 5


class Layer(nn.Module):
    """Reads the streams, and gives a block's output for the next read to write."""

    def __init__(self):
        super().__init__()
        self.w_norm = nn.Parameter(torch.ones(HC, N))
        self.w_down = nn.Parameter(torch.randn(LR, HC * N) / (HC * N) ** 0.5)
        self.w_up = nn.Parameter(torch.randn(HC * N, LR) / LR**0.5)
        self.w_inject = nn.Parameter(torch.randn(HC, HC * N) / (HC * N) ** 0.5)
        self.block = nn.Sequential(nn.Linear(N, N), nn.GELU())

    def forward(self, streams, pending):
        weights = [w.bfloat16() for w in (self.w_down, self.w_up, self.w_inject)]
        read = strata_ops.fused_gr_read(streams, self.w_norm, *weights, *pending)
        streams = streams if read.residual_out is None else read.residual_out
        return streams, (self.block(read.mixed), read.inject)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, streams):
        pending = (None, None)
        for layer in self.layers:
            streams, pending = layer(streams, pending)
        return pending[0]


def main():
    world, rank, local_rank = (
        int(os.environ.get(n, d)) for n, d in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))
    )
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)  # the same weights and tokens in every process
    model = Model().to(device)
    if world > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    streams, target = torch.randn(TOKENS, HC, N), torch.randn(TOKENS, N)
    share = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    streams, target = streams[share].to(device), target[share].to(device)
    for step in range(STEPS):
        loss = (model(streams) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss, dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step}: loss {loss.item() / world:.5f}")
    if world > 1:
        # While this waits, gloo's threads can let go of the last loss. Left to the end of Python, that would end the
        # process (seen with torch 2.13, one run in four).
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
