"""The model around the reads in decode_loop.py and speculative.py: random weights, and one matrix for every block."""

import torch

N, HC, LR, VOCABULARY = 2560, 4, 320, 1000


class Toy:
    """Random weights: of the reads, in the op's order, and of what is around them."""

    def __init__(self, reads: int, device: str, block_gain: float):
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float) -> torch.Tensor:
            return (torch.randn(shape, generator=random) * scale).to(device)

        self.reads = [
            (
                1 + normal(HC, N, scale=0.1),
                normal(LR, HC * N, scale=0.02).bfloat16(),
                normal(HC * N, LR, scale=0.2).bfloat16(),
                normal(HC, HC * N, scale=0.02).bfloat16(),
            )
            for _ in range(reads)
        ]
        self.embedding = normal(VOCABULARY, N, scale=1.0)
        self.block = normal(N, N, scale=block_gain / N**0.5)
        self.head = normal(N, VOCABULARY, scale=1 / N**0.5)
