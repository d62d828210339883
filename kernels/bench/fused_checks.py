"""What lies between the matmuls, against float64: norms, SiLU, rotary with the cache, maxima."""

from __future__ import annotations

import torch
from lorad_kernels import AttentionBatch, add_rms_norm, rotate_and_store, row_max, silu_mul
from report import UNIT, Report
from torch import Tensor


def check_fused(
    report: Report, device: torch.device, dtypes: list[torch.dtype], tiny: bool
) -> None:
    widths = (75, 576) if tiny else (576, 960, 1536, 4096, 14336)
    for dtype in dtypes:
        for width in widths:
            _check_norm(report, device, dtype, width)
            _check_silu(report, device, dtype, width)
        for shape in ((3, 1, 64), (4, 2, 128), (5, 5, 80)):
            _check_rotary(report, device, dtype, shape)
        for width in (50, 9000) if tiny else (50, 32000, 128256):
            _check_max(report, device, dtype, width)


def _near(got: Tensor, want: Tensor, size: Tensor, dtype: torch.dtype) -> bool:
    return bool(((got.double() - want).abs() <= UNIT[dtype] * size + 1e-7).all())


def _check_norm(report: Report, device: torch.device, dtype: torch.dtype, width: int) -> None:
    what = f"add_rms_norm {dtype} {width}"
    x, weight = 50 * torch.randn(5, width, device=device), torch.randn(width, device=device)
    delta = torch.randn(5, width, device=device).to(dtype)
    added = x + delta
    out = add_rms_norm(x, delta, weight, 1e-5, dtype)
    report.check(torch.equal(x, added), f"{what}: the stream")
    exact = added.double()
    want = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    report.check(_near(out, want, want.abs(), dtype), what)
    alone = add_rms_norm(x[3:4].clone(), None, weight, 1e-5, dtype)
    report.check(torch.equal(alone[0], out[3]), f"{what}: other bits in a batch")


def _check_silu(report: Report, device: torch.device, dtype: torch.dtype, width: int) -> None:
    gate_up = (8 * torch.randn(3, 2 * width, device=device)).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    want = gate / (1 + (-gate).exp()) * up
    report.check(_near(silu_mul(gate_up), want, want.abs(), dtype), f"silu_mul {dtype} {width}")


def _check_rotary(
    report: Report, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    heads, kv_heads, dim = shape
    what = f"rotate_and_store {dtype} {heads}/{kv_heads}x{dim}"
    qkv = torch.randn(3, heads + 2 * kv_heads, dim, device=device).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    angles = torch.randn(3, dim // 2, device=device).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slab = torch.full((5, 2, 2, 16, kv_heads, dim), torch.nan, dtype=dtype, device=device)
    keys, values = slab[:, 1, 0], slab[:, 1, 1]
    batch = _places(device, [4, 0, 4], [1, 3, 15])
    out = rotate_and_store(q, k, v, cos, sin, keys, values, batch)
    for got, source, part in (
        (out, q, "q"),
        (keys[batch.kv_pages, batch.kv_offsets], k, "k"),
    ):
        first, second = source.double().chunk(2, -1)
        turned = torch.cat([-second, first], -1) * sin[:, None].double()
        kept = source.double() * cos[:, None].double()
        right = _near(got, kept + turned, kept.abs() + turned.abs(), dtype)
        report.check(right, f"{what}: {part}")
    report.check(torch.equal(values[batch.kv_pages, batch.kv_offsets], v), f"{what}: v")
    untouched = int(slab.isfinite().sum()) == 3 * 2 * kv_heads * dim
    report.check(untouched, f"{what}: wrote elsewhere")


def _places(device: torch.device, pages: list[int], offsets: list[int]) -> AttentionBatch:
    count = len(pages)
    return AttentionBatch(
        query_starts=tuple(range(count + 1)),
        context_lens=(1,) * count,
        num_decodes=count,
        block_tables=torch.zeros(count, 1, dtype=torch.int64, device=device),
        context_lens_device=torch.ones(count, dtype=torch.int64, device=device),
        kv_pages=torch.tensor(pages, device=device),
        kv_offsets=torch.tensor(offsets, device=device),
    )


def _check_max(report: Report, device: torch.device, dtype: torch.dtype, width: int) -> None:
    x = torch.randn(4, width, device=device).to(dtype)
    x[1, [width // 3, width - 1]] = 60.0
    x[2] = -torch.inf
    x[3, width - 1] = torch.nan
    values, indices = row_max(x)
    firsts = [int((x[row] == x[row].max()).nonzero()[0, 0]) for row in range(3)]
    right = indices[:3].tolist() == firsts and bool(values.isnan().tolist() == [False] * 3 + [True])
    report.check(right, f"row_max {dtype} {width}")
