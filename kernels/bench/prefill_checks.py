"""Prefill attention against float64, and the memory that it takes beside K and V."""

from __future__ import annotations

import torch
from lorad_kernels import AttentionBatch, paged_attention
from report import UNIT, Report
from torch import Tensor

BLOCK = 16


def check_prefill(
    report: Report, device: torch.device, dtypes: list[torch.dtype], tiny: bool
) -> None:
    """A whole prompt, a later chunk, and one row and a few behind a long prefix, together."""
    heads = [(6, 2, 32)] if tiny else [(32, 8, 128), (9, 3, 64), (28, 4, 128), (5, 5, 80)]
    sequences = [(40, 40), (30, 95), (1, 50)]
    if not tiny:
        sequences = [(1000, 1000), (512, 1700), (1, 2049), (7, 4095), (3, 3)]
    for dtype in dtypes:
        for shape in heads:
            for window in (None, 1, 100):
                _check_case(report, device, dtype, shape, sequences, window)
    if device.type == "cuda":
        _check_memory(report, device)


def _check_case(
    report: Report,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    sequences: list[tuple[int, int]],
    window: int | None,
) -> None:
    heads, kv_heads, dim = shape
    q, k_cache, v_cache, batch = _drawn(device, dtype, shape, sequences)
    got = paged_attention(q, k_cache, v_cache, batch, scale=0.1, sliding_window=window)
    for i, (rows, context) in enumerate(sequences):
        own = slice(batch.query_starts[i], batch.query_starts[i + 1])
        pages = batch.block_tables[i]
        k, v = (x[pages].flatten(0, 1)[:context].double() for x in (k_cache, v_cache))
        behind = torch.arange(context - rows, context, device=device)[:, None]
        behind = behind - torch.arange(context, device=device)
        seen = (behind >= 0) & (behind < window if window else True)
        grouped = q[own].double().view(rows, kv_heads, heads // kv_heads, dim)
        scores = 0.1 * torch.einsum("qhgd,khd->hgqk", grouped, k)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        want = torch.einsum("hgqk,khd->qhgd", weights, v).reshape(rows, heads, dim)
        error = (got[own].double() - want).abs().max().item()
        what = f"prefill {dtype} {heads}/{kv_heads}x{dim} window {window} {rows} of {context}"
        report.check(error <= 4 * UNIT[dtype], f"{what}: error {error:.2g}")


def _check_memory(report: Report, device: torch.device) -> None:
    """A chunk of a long prompt: scores or a mask would take far more than K and V do."""
    rows, context = 2048, 32768
    q, k_cache, v_cache, batch = _drawn(device, torch.bfloat16, (32, 8, 128), [(rows, context)])
    for window in (None, 4096):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        paged_attention(q, k_cache, v_cache, batch, scale=0.1, sliding_window=window)
        taken = torch.cuda.max_memory_allocated(device) - before
        seen = min(context, window + rows) if window else context
        allowed = 2 * (2 * (seen + BLOCK) * 8 * 128) + 3 * q.nbytes
        what = f"prefill of {rows} rows at {context}, window {window}"
        report.check(taken <= allowed, f"{what}: {taken} bytes, not {allowed}")


def _drawn(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    sequences: list[tuple[int, int]],
) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """q, K and V in pages of any order, NaN behind each context, and the batch."""
    heads, kv_heads, dim = shape
    blocks = [-(-context // BLOCK) for _, context in sequences]
    slab = torch.randn(sum(blocks), 2, 2, BLOCK, kv_heads, dim, device=device).to(dtype)
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int64, device=device)
    starts = [0]
    for i, own in enumerate(torch.randperm(sum(blocks)).split(blocks)):
        rows, context = sequences[i]
        tables[i] = own[0]
        tables[i, : len(own)] = own.to(device)
        if context % BLOCK:
            slab[own[-1], :, :, context % BLOCK :] = torch.nan
        starts.append(starts[-1] + rows)
    contexts = [context for _, context in sequences]
    none = torch.zeros(starts[-1], dtype=torch.int64, device=device)
    batch = AttentionBatch(
        query_starts=tuple(starts),
        context_lens=tuple(contexts),
        num_decodes=0,
        block_tables=tables,
        context_lens_device=torch.tensor(contexts, device=device),
        kv_pages=none,
        kv_offsets=none,
    )
    q = torch.randn(starts[-1], heads, dim, device=device).to(dtype)
    return q, slab[:, 1, 0], slab[:, 1, 1], batch
