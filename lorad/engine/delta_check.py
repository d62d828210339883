"""The deltas that the engine added, beside those that the version's files call for.

The reference is `scaling * (x A^T) B^T` in float64 for the recorded x, from A and B as they are
in the files, cast once to the serving dtype. Nothing of it comes from the slab, the packed copy
or the tables. What may differ is rounding, and that is bounded as follows (Higham, Accuracy and
Stability of Numerical Algorithms, 2002, 3.1; Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019,
for sums). With h = x A^T, u the unit roundoff of the serving dtype and v = 2^-24 of float32, in
which all kernels sum:

- h is off by sqrt(in) v |x| |A|^T from its sum, and is stored with u |h|, or less;
- the product with B^T by sqrt(rank) v, its rounding by u, the addition by u.

So output n of a row is off by at most `scaling` times

    ((4 u + sqrt(rank) v) |h| + sqrt(in) v |x| |A|^T) |B_n|^T

and by the dtype's smallest number, which matters in float16 alone. For typical factors that is
1e-6 to 1e-4 of a delta in float32, 0.2 % in float16, 2 % in bfloat16. The bound is applied to each
output of a linear over all rows of the prompt: one wrong element of B shows in one output only,
and would be lost in the norm of them all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lorad.adapter_ref import AdapterRef
from lorad.adapters.weights import LinearFactors, read_factors
from lorad.engine.messages import AdapterProbed, CommandFailed, ProbeAdapter
from lorad.engine.probe import RecordedDelta
from lorad.errors import LoradError
from lorad.sizing.model_shape import ModelShape

log = logging.getLogger(__name__)

_FLOAT32 = 2.0**-24  # v above
_FAULT = (
    "the files are good and what lies on the device is not: unload the version and try again; "
    "if it fails again, the fault is lorad's or the machine's"
)

_TOO_LARGE = "its weights are too large for the serving dtype; push another checkpoint"


@dataclass(frozen=True, slots=True)
class DeltaCheck:
    """`modules` that have factors, and the largest difference of a delta in norm, relative."""

    modules: int
    error: float


@dataclass(frozen=True, slots=True)
class _Slice:
    """One linear's part of a record."""

    x: Tensor  # [T, in]
    deltas: tuple[Tensor, ...]  # each [T, out]


@dataclass(frozen=True, slots=True)
class _Compared:
    """The larger error of a linear's deltas, in norm and relative, and what is wrong with them."""

    error: float
    fault: LoradError | None


def check_deltas(
    recorded: Sequence[RecordedDelta], factors: Iterable[LinearFactors], shape: ModelShape
) -> DeltaCheck:
    """Raises `selftest.failed` naming the first linear whose delta is not what it must be.

    The first in the order of computation, as NaN spreads from there. A linear without factors
    must have a delta of exactly zero.
    """
    parts = _by_path(recorded, shape)
    found = {linear.path: _compare(linear, parts[linear.path]) for linear in factors}
    for path, part in parts.items():
        fault = found[path].fault if path in found else _expect_nothing(path, part)
        if fault is not None:
            raise fault
    return DeltaCheck(len(found), max((one.error for one in found.values()), default=0.0))


def _expect_nothing(path: str, part: _Slice) -> LoradError | None:
    if not any(bool(delta.any()) for delta in part.deltas):
        return None
    return _failed(path, "the engine adds a delta where the files have no factors")


def _by_path(recorded: Sequence[RecordedDelta], shape: ModelShape) -> dict[str, _Slice]:
    return {
        f"model.layers.{record.layer}.{projection.parent}.{part.leaf}": _Slice(
            record.x,
            tuple(
                delta[:, part.out_start : part.out_start + part.out_features]
                for delta in record.deltas
            ),
        )
        for record in recorded
        for projection in (shape.projections[record.projection],)
        for part in projection.slices
    }


def _compare(linear: LinearFactors, part: _Slice) -> _Compared:
    dtype = part.x.dtype
    x, a, b = part.x.double(), linear.a.to(dtype).double(), linear.b.to(dtype).double()
    h = x @ a.T
    expected = linear.scaling * (h @ b.T)
    allowed = (_rounding(x, a, h, dtype) @ b.abs().T) * abs(linear.scaling) + _smallest(dtype)
    error, fault, size = 0.0, None, max(float(expected.norm()), _smallest(dtype))
    for delta in part.deltas:
        error = max(error, float((delta.double() - expected).norm()) / size)
        fault = fault or _fault(linear.path, delta, expected, allowed)
    return _Compared(error, fault)


def _rounding(x: Tensor, a: Tensor, h: Tensor, dtype: torch.dtype) -> Tensor:
    """`[T, rank]`: by how much h may be off, its share of the later roundings included."""
    rank, width = a.shape
    unit = torch.finfo(dtype).eps / 2
    stored = (4 * unit + math.sqrt(rank) * _FLOAT32) * h.abs() + _smallest(dtype)
    return stored + math.sqrt(width) * _FLOAT32 * (x.abs() @ a.abs().T)


def _smallest(dtype: torch.dtype) -> float:
    """The smallest positive number: what rounding may lose whatever the size."""
    found = torch.finfo(dtype)
    return found.tiny * found.eps


def _fault(path: str, delta: Tensor, expected: Tensor, allowed: Tensor) -> LoradError | None:
    """All `[T, out]`; errors are compared output by output, in norm over the rows."""
    dtype = str(delta.dtype).removeprefix("torch.")
    if not bool(torch.isfinite(delta).all()):
        can_be = bool(torch.isfinite(expected.to(delta.dtype)).all())
        why = f"the delta is not finite in {dtype}"
        return _failed(path, why, hint=_FAULT if can_be else _TOO_LARGE)
    off, allowed = (delta.double() - expected).norm(dim=0), allowed.norm(dim=0)
    if bool((off <= allowed).all()):  # written so that NaN is wrong
        return None
    output = int((off - allowed).nan_to_num(math.inf).argmax())
    error, bound = float(off[output]), float(allowed[output])
    return _failed(
        path,
        f"the engine adds another delta than the files say: output {output} is off by "
        f"{error:.3g}, and rounding to {dtype} explains {bound:.3g}",
        output=output,
        error=error if math.isfinite(error) else None,  # JSON has no infinity
        allowed=bound,
    )


def _failed(path: str, why: str, *, hint: str = _FAULT, **details: object) -> LoradError:
    details["module"] = path
    return LoradError("selftest.failed", f"{path}: {why}", hint=hint, details=details)


class DeltaChecker:
    """Checks probes one after the other, on a thread that begins with the first of them."""

    def __init__(
        self,
        files: Callable[[AdapterRef], Path],
        shape: ModelShape,
        on_done: Callable[[AdapterProbed | CommandFailed], None],
    ) -> None:
        """`files` gives the directory of a version whose bytes it has proved by their digest.

        `on_done` is called on the checker's thread.
        """
        self._files = files
        self._shape = shape
        self._on_done = on_done
        self._thread = ThreadPoolExecutor(1, "lorad-checker")

    def check(self, probe: ProbeAdapter, recorded: Sequence[RecordedDelta], seconds: float) -> None:
        """Returns at once. `seconds` is what the probe took, for the answer."""
        self._thread.submit(lambda: self._on_done(self._answer(probe, recorded, seconds)))

    def _answer(
        self, probe: ProbeAdapter, recorded: Sequence[RecordedDelta], seconds: float
    ) -> AdapterProbed | CommandFailed:
        try:
            factors = read_factors(self._files(probe.adapter), self._shape)
            found = check_deltas(recorded, factors, self._shape)
        except LoradError as error:
            return CommandFailed(probe.command_id, error)
        except Exception as error:
            log.exception("comparing the deltas of %s failed", probe.adapter)
            failed = LoradError("engine.failed", f"the deltas could not be compared: {error}")
            return CommandFailed(probe.command_id, failed)
        return AdapterProbed(probe.command_id, found.modules, found.error, seconds)
