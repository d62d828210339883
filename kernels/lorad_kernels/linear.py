"""The base model's projections, in the form that is fastest on their device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.nn.functional import linear

# x [T, in] -> x W^T + bias, [T, out].
BaseLinear = Callable[[Tensor], Tensor]


def base_linear(weight: Tensor, bias: Tensor | None = None) -> BaseLinear:
    """A projection by `weight [out, in]`. The weight is read in place: it must not move."""
    if weight.device.type == "cpu":
        from lorad_kernels.cpu_linear import CpuLinear

        return CpuLinear(weight, bias)
    return partial(linear, weight=weight, bias=bias)


def tune_linears(linears: Sequence[BaseLinear], spare_bytes: int) -> None:
    """Choose by short measurements how each projection is computed, once all are loaded.

    On the CPU, copies of the weights in another layout are kept if they fit in `spare_bytes`.
    Takes about two seconds at most beside the copying.
    """
    from lorad_kernels.cpu_linear import CpuLinear, tune

    tune([one for one in linears if isinstance(one, CpuLinear)], spare_bytes)
