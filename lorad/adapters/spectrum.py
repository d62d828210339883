"""What an adapter's tensors hold: norms, singular values, and fewer ranks for the same delta.

The delta of a module is `scaling * B @ A`, `[out, in]`; it is never formed. With B = Qb Rb and
A^T = Qa Ra, the r x r matrix Rb Ra^T has the same singular values. To look at them, Rb and Ra
come from the Gram matrices (20 times faster than QR; values below 1e-8 of the largest are lost,
which no energy depends on); to write new factors, from QR itself.

Imports numpy: nothing that runs at start-up may import this module.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lorad.adapters.findings import Finding
from lorad.adapters.lora_modules import LoraModule
from lorad.adapters.peft_format import ByteSource, PeftAdapter, TensorEntry, open_adapter
from lorad.errors import LoradError
from lorad.sizing.model_shape import ModelShape

Matrix = npt.NDArray[np.float64]
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ModuleStats:
    """`norm` is the Frobenius norm of the delta; `singular_values` descend, and may be empty."""

    module: LoraModule
    norm: float
    singular_values: tuple[float, ...] = ()

    def effective_rank(self, energy: float) -> int:
        """The least rank that keeps `energy` (0..1) of the squared norm; 0 for a zero delta."""
        return rank_for_energy(self.singular_values, energy)


def rank_for_energy(singular_values: Sequence[float], energy: float) -> int:
    """The fewest leading values whose squares sum to `energy` of all of them."""
    kept = list(accumulate(value * value for value in singular_values))
    if not kept or kept[-1] == 0.0:
        return 0
    return bisect_left(kept, energy * kept[-1]) + 1


def read_factor(source: ByteSource, entry: TensorEntry) -> npt.NDArray[np.float32]:
    """One factor as float32 `[rows, columns]`; every F32, BF16 and F16 value is exact in it."""
    raw = source.read_at(entry.start, entry.nbytes)
    if entry.dtype == "BF16":
        bits = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16
        values = bits.view(np.float32)
    else:
        values = np.frombuffer(raw, dtype="<f2" if entry.dtype == "F16" else "<f4")
    return values.astype(np.float32, copy=False).reshape(entry.shape)


def measure(
    modules: Iterable[LoraModule], source: ByteSource, *, spectrum: bool
) -> tuple[list[ModuleStats], list[Finding]]:
    """Read every factor once. Raises `adapter.nonfinite_weights` naming all that hold NaN or Inf.

    The findings say which deltas are zero.
    """
    stats: list[ModuleStats] = []
    broken: list[str] = []
    for module in modules:
        a, b = read_factor(source, module.a), read_factor(source, module.b)
        names = [entry.name for entry, x in ((module.a, a), (module.b, b)) if not _is_finite(x)]
        broken.extend(names)
        if not names:
            stats.append(_measured(module, a.astype(np.float64), b.astype(np.float64), spectrum))
    if broken:
        raise _nonfinite(broken)
    return stats, list(_zero_findings(stats))


def read_checked(
    directory: Path, shape: ModelShape | None, *, max_lora_rank: int | None = None
) -> PeftAdapter:
    """`read_adapter` that reads the values too: NaN is refused, a zero delta is a warning."""
    with open_adapter(directory, shape, max_lora_rank=max_lora_rank) as (adapter, source):
        _, findings = measure(adapter.modules, source, spectrum=False)
    return replace(adapter, warnings=(*adapter.warnings, *findings))


def _is_finite(values: npt.NDArray[np.float32]) -> bool:
    return bool(np.isfinite(values).all())


def _nonfinite(names: list[str]) -> LoradError:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return LoradError(
        "adapter.nonfinite_weights",
        f"NaN or infinity in {', '.join(names[:_SHOWN])}{more}",
        hint="the training run diverged; use an earlier checkpoint",
        details={"tensors": names[:_SHOWN], "count": len(names)},
    )


def _measured(module: LoraModule, a: Matrix, b: Matrix, spectrum: bool) -> ModuleStats:
    if spectrum:
        core = _gram_root(b.T @ b) @ _gram_root(a @ a.T).T
        values = abs(module.scaling) * np.linalg.svd(core, compute_uv=False)
        values = values[: min(b.shape[0], a.shape[1])]  # the others are 0
        return ModuleStats(module, float(np.linalg.norm(values)), tuple(values.tolist()))
    squared = float(np.sum((b.T @ b) * (a @ a.T)))  # trace of (BA)^T BA
    return ModuleStats(module, abs(module.scaling) * max(squared, 0.0) ** 0.5)


def _gram_root(gram: Matrix) -> Matrix:
    """R `[r, r]` with R^T R = gram: as good as the R of a QR, up to a rotation."""
    values, vectors = np.linalg.eigh(gram)
    root: Matrix = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
    return root


def _zero_findings(stats: Sequence[ModuleStats]) -> Iterator[Finding]:
    zero = [one.module.path for one in stats if one.norm == 0.0]
    if not zero:
        return
    details: dict[str, Any] = {"modules": zero[:_SHOWN], "count": len(zero)}
    if len(zero) == len(stats):
        message = "every delta is zero: answers will be those of the base model"
        yield Finding("adapter.zero_delta", message, details)
    else:
        more = f" and {len(zero) - _SHOWN} more" if len(zero) > _SHOWN else ""
        yield Finding("zero_modules", f"zero delta in {', '.join(zero[:_SHOWN])}{more}", details)


@dataclass(frozen=True, slots=True)
class Truncation:
    """New factors with the scaling folded in: the delta is `b @ a`, `kept` its share of energy."""

    a: Matrix
    b: Matrix
    kept: float


def truncate(module: LoraModule, source: ByteSource, rank: int) -> Truncation:
    """The best approximation of one delta of the given rank (Eckart-Young)."""
    a, b = (read_factor(source, entry).astype(np.float64) for entry in (module.a, module.b))
    qb, rb = np.linalg.qr(b)
    qa, ra = np.linalg.qr(a.T)
    u, values, vt = np.linalg.svd(rb @ ra.T)
    values = values * abs(module.scaling)
    half = np.sqrt(values[:rank])
    total = float(np.sum(values**2))
    return Truncation(
        a=half[:, None] * (vt[:rank] @ qa.T),
        b=(qb @ u[:, :rank]) * (half * np.sign(module.scaling)),
        kept=float(np.sum(values[:rank] ** 2)) / total if total else 1.0,
    )
