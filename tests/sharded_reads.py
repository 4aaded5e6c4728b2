"""Two processes share the tokens of reads as DTensors; run by test_distributed.py. Prints what was right."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing

import strata_ops
from support import SMALL, Inputs, as_bytes, make_inputs

RANKS = 2
ACTIVATIONS = ("residual", "block_out", "inject_prev")


def check(rank):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    assert "strata_ops.dtensor" not in sys.modules
    mesh = init_device_mesh("cpu", (RANKS,))

    def distributed(inputs, tokens):
        places = {name: [tokens if name in ACTIVATIONS else Replicate()] for name in Inputs._fields}
        return Inputs(*(t if t is None else distribute_tensor(t, mesh, places[n]) for n, t in inputs._asdict().items()))

    def assert_read(read, place, inputs, **options):
        plain = strata_ops.fused_gr_read(*inputs, **options)
        for name, ours, theirs in zip(plain._fields, read, plain, strict=True):
            assert (ours is None) == (theirs is None), name
            if theirs is not None:
                assert ours.placements == (place,), f"{name} is {ours.placements}"
                assert torch.equal(as_bytes(ours.full_tensor()), as_bytes(theirs)), name

    inputs = make_inputs(SMALL, 5)  # three and two
    for asked in (inputs, inputs.ask(fold=False), inputs.ask(inject=False), inputs.ask(fold=False, inject=False)):
        for q8_1 in (False, True):
            assert_read(strata_ops.fused_gr_read(*distributed(asked, Shard(0)), q8_1=q8_1), Shard(0), asked, q8_1=q8_1)
    said = ["bytes"]

    read = strata_ops.fused_gr_read(*distributed(inputs, Replicate()))
    assert_read(read, Replicate(), inputs)
    said.append("replicated")

    pairs = make_inputs(SMALL, 6)
    pairs = pairs._replace(**{n: getattr(pairs, n).unflatten(0, (3, 2)) for n in ACTIVATIONS})
    assert_read(strata_ops.fused_gr_read(*distributed(pairs, Shard(1))), Shard(1), pairs)
    said.append("second dimension")

    for awkward in (Shard(1), Shard(2)):  # streams and positions: no rule takes these shares
        given = distributed(inputs.ask(fold=False), Replicate())
        given = given._replace(
            residual=distribute_tensor(inputs.residual, mesh, [awkward]),
            w_up=distribute_tensor(inputs.w_up, mesh, [Shard(0)]),
        )
        mixed = strata_ops.fused_gr_read(*given).mixed.full_tensor()
        assert torch.equal(as_bytes(mixed), as_bytes(strata_ops.fused_gr_read(*inputs.ask(fold=False)).mixed))
    said.append("redistributed")

    leaves = distributed(inputs, Shard(0)).map(lambda t: t.detach().requires_grad_())
    plain = inputs.map(lambda t: t.clone().requires_grad_())
    for given in (leaves, plain):
        read = strata_ops.fused_gr_read(*given)
        (read.mixed.sum() + read.inject.sum() + read.residual_out.sum()).backward()
    for name, ours, theirs in zip(Inputs._fields, leaves, plain):
        relative = 2.0**-6 if theirs.dtype == torch.bfloat16 else 1e-5  # each process's share is rounded
        close = torch.allclose(ours.grad.full_tensor(), theirs.grad, rtol=relative, atol=relative)
        assert close, f"gradient of {name}"
    said.append("gradients")

    given = distributed(inputs, Shard(0))
    compiled = torch.compile(lambda *t: strata_ops.fused_gr_read(t[0] * 1, *t[1:]), fullgraph=True, backend="aot_eager")
    assert_read(compiled(*given), Shard(0), inputs)
    leaf = given.w_up.detach().requires_grad_()
    sum(t.sum() for t in compiled(*given._replace(w_up=leaf)) if t is not None).backward()
    assert leaf.grad.placements == (Partial(),)
    said.append("compiled")

    out = strata_ops.fused_gr_read(*distributed(inputs, Shard(0)))
    for refused in (
        lambda: strata_ops.fused_gr_read_(*distributed(inputs, Shard(0))),
        lambda: strata_ops.fused_gr_read_out(*distributed(inputs, Shard(0)), out=out),
    ):
        try:
            refused()
        except RuntimeError as error:
            assert "to_local()" in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError("not refused")
    said.append("refusals")
    if rank == 0:
        print(", ".join(said))


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    check(rank)
    dist.barrier()  # as in examples/data_parallel.py
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "torch.distributed.tensor" not in sys.modules, "the import of strata_ops is to be light"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), RANKS)
