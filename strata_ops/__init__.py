"""The gated-residual read of Qwen3.8-Flash-Next (`qwen4_exp`) as one PyTorch op, with one answer on every device.

    import strata_ops
    read = strata_ops.fused_gr_read(residual, w_norm, w_down, w_up, w_inject)
    read.mixed, read.inject, ...

`python -m strata_ops info` says what runs here and why, `doctor` what is wrong and what to set, `check` runs a GPU's
self-test, `parity` compares all bits with the CPU's, `demo` shows it at work.
"""

from . import _libraries as _libraries  # first: it says in one line what is missing
from . import _read_flops as _read_flops
from . import _vmap as _vmap
from . import debug as debug  # not public, see there
from .gate import check, listen
from .info import info
from .ops import FusedGrRead, fused_gr_read, fused_gr_read_, fused_gr_read_out

__version__ = "0.1.0"  # the packaging reads it here
__all__ = ["FusedGrRead", "__version__", "check", "fused_gr_read", "fused_gr_read_", "fused_gr_read_out", "info"]

listen()
