"""The public API as a typed program uses it; `make style` checks it by mypy --strict. Wrong uses must be errors: an
ignored error that is none is one itself. Nothing runs this file."""

from collections.abc import Sequence
from typing import Any

import torch

import strata_ops
import strata_ops.dtensor
import strata_ops.nn
from strata_ops import FusedGrRead
from strata_ops.integrations.transformers import patch, unpatch

residual = torch.randn(2, 4, 2560)
w_norm, w_down, w_up = torch.ones(4, 2560), torch.randn(320, 10240).bfloat16(), torch.randn(10240, 320).bfloat16()

read: FusedGrRead = strata_ops.fused_gr_read(residual, w_norm, w_down, w_up, eps=1e-6, q8_1=False)
mixed: torch.Tensor = read.mixed
inject: torch.Tensor | None = read.inject
outputs: tuple[torch.Tensor | None, ...] = read
in_place: FusedGrRead = strata_ops.fused_gr_read_(residual, w_norm, w_down, w_up, None, mixed, inject)
written: FusedGrRead = strata_ops.fused_gr_read_out(residual, w_norm, w_down, w_up, out=read._replace(inject=None))
facts: dict[str, Any] = strata_ops.info()
tested: dict[str, Any] = strata_ops.check(torch.device("cuda", 0))
version: str = strata_ops.__version__
rules: Sequence[object] = strata_ops.dtensor.read_shardings(residual, w_norm, w_down, w_up)
module: strata_ops.nn.GatedResidual = strata_ops.nn.GatedResidual(2560, prefill="library")
also: strata_ops.nn.GatedRead = module.read(residual.flatten(-2), mixed, inject)
model: torch.nn.Module = unpatch(patch(torch.nn.Sequential(module), prefill="exact", round_weights=True))

read.inject + 1  # type: ignore[operator]  # None where it was not asked for
print(read.outject)  # type: ignore[attr-defined]
strata_ops.fused_gr_read(residual, w_norm, w_down)  # type: ignore[call-arg]
strata_ops.fused_gr_read(residual, w_norm, w_down, w_up, eps="small")  # type: ignore[arg-type]
strata_ops.fused_gr_read(residual, w_norm, w_down, w_up, None, None, None, 1e-6)  # type: ignore[call-arg]
strata_ops.fused_gr_read_out(residual, w_norm, w_down, w_up, out=[mixed])  # type: ignore[arg-type]
strata_ops.info(7)  # type: ignore[arg-type]
strata_ops.nn.GatedResidual(2560, prefill="fast")  # type: ignore[arg-type]
