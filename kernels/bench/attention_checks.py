"""Attention against float64: decodes, whole prompts and chunks of prompts, windows, soft caps."""

from __future__ import annotations

from itertools import accumulate, product

import torch
from lorad_kernels import AttentionBatch, paged_attention
from report import UNIT, Report
from torch import Tensor

BLOCK = 16
SCALE = 0.1
# (new rows, context): a decode, short and long whole prompts, and chunks of longer ones.
PROMPTS = ((1, 257), (5, 5), (200, 200), (70, 300), (3, 1000))
TINY_PROMPTS = ((1, 17), (5, 5), (70, 70), (20, 130), (3, 40))


def check_attention(
    report: Report, device: torch.device, dtypes: list[torch.dtype], tiny: bool
) -> None:
    """Decodes, with NaN behind every context; and each one's bits in other batches."""
    heads = [(6, 2, 32)] if tiny else [(32, 8, 128), (9, 3, 64), (28, 4, 128), (5, 5, 80)]
    contexts = [1, 17, 300] if tiny else [1, 16, 257, 1000, 4095]
    sequences = [(1, context) for context in contexts]
    for dtype, shape, window, softcap in product(dtypes, heads, (None, 100), (None, 20.0)):
        what = f"attention {_name(dtype, shape)} {window} {softcap}"
        case = _Case(device, dtype, shape, sequences)
        case.compare(report, what, window, softcap)
        got, last = case.run(0, window, softcap), len(contexts) - 1
        alone = torch.equal(case.run(last, window, softcap)[0], got[-1])
        report.check(alone, f"{what}: other bits in a batch")


def check_prefill_attention(
    report: Report, device: torch.device, dtypes: list[torch.dtype], tiny: bool
) -> None:
    """Prompts behind a decode, whole and in chunks, with a sliding window and without."""
    heads = [(6, 2, 32)] if tiny else [(32, 8, 128), (9, 3, 64), (28, 4, 128), (5, 5, 80)]
    sequences = list(TINY_PROMPTS if tiny else PROMPTS)
    for dtype, shape, window in product(dtypes, heads, (None, 60)):
        what = f"prefill attention {_name(dtype, shape)} {window}"
        _Case(device, dtype, shape, sequences).compare(report, what, window, None)


def check_prefill_memory(report: Report, device: torch.device) -> None:
    """A chunk of a long prompt: scores or a mask would take far more than K and V do."""
    count, context = 2048, 32768
    case = _Case(device, torch.bfloat16, (32, 8, 128), [(count, context)])
    for window in (None, 4096):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        case.run(0, window, None)
        taken = torch.cuda.max_memory_allocated(device) - before
        seen = min(context, window + count) if window else context
        allowed = 2 * (2 * (seen + BLOCK) * 8 * 128) + 3 * case.q.nbytes
        what = f"prefill of {count} rows at {context}, window {window}"
        report.check(taken <= allowed, f"{what}: {taken} bytes, not {allowed}")


def _name(dtype: torch.dtype, shape: tuple[int, int, int]) -> str:
    heads, kv_heads, dim = shape
    return f"{dtype} {heads}/{kv_heads}x{dim}"


class _Case:
    """Random queries of some sequences, and their pages in any order."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        sequences: list[tuple[int, int]],
    ) -> None:
        heads, kv_heads, dim = shape
        self.device, self.dtype, self.sequences = device, dtype, sequences
        blocks = [-(-context // BLOCK) for _, context in sequences]
        pages = iter(torch.randperm(sum(blocks)).tolist())
        tables = [[next(pages) for _ in range(count)] for count in blocks]
        slab = torch.randn(sum(blocks), 2, 2, BLOCK, kv_heads, dim, device=device).to(dtype)
        for (_, context), table in zip(sequences, tables, strict=True):
            if context % BLOCK:
                slab[table[-1], :, :, context % BLOCK :] = torch.nan
        self.k_cache, self.v_cache = slab[:, 1, 0], slab[:, 1, 1]
        padded = [table + table[:1] * (max(blocks) - len(table)) for table in tables]
        self.tables = torch.tensor(padded, device=device)
        self.starts = list(accumulate((count for count, _ in sequences), initial=0))
        self.q = torch.randn(self.starts[-1], heads, dim, device=device).to(dtype)

    def run(self, first: int, window: int | None, softcap: float | None) -> Tensor:
        """The attention of the sequences from `first` on, in one batch."""
        begin, sequences = self.starts[first], self.sequences[first:]
        contexts = [context for _, context in sequences]
        nowhere = torch.zeros(self.starts[-1] - begin, dtype=torch.int64, device=self.device)
        batch = AttentionBatch(
            query_starts=tuple(start - begin for start in self.starts[first:]),
            context_lens=tuple(contexts),
            num_decodes=sum(count == 1 for count, _ in sequences),
            block_tables=self.tables[first:],
            context_lens_device=torch.tensor(contexts, device=self.device),
            kv_pages=nowhere,
            kv_offsets=nowhere,
        )
        return paged_attention(
            self.q[begin:], self.k_cache, self.v_cache, batch,
            scale=SCALE, sliding_window=window, softcap=softcap,
        )  # fmt: skip

    def compare(self, report: Report, what: str, window: int | None, softcap: float | None) -> None:
        got = self.run(0, window, softcap)
        for i, (count, context) in enumerate(self.sequences):
            rows = slice(self.starts[i], self.starts[i + 1])
            error = (got[rows].double() - self._exact(i, window, softcap)).abs().max().item()
            # `not >` would let NaN pass.
            right = error <= 4 * UNIT[self.dtype]
            report.check(right, f"{what} rows {count} context {context}: error {error:.2g}")

    def _exact(self, i: int, window: int | None, softcap: float | None) -> Tensor:
        """`[n, heads, dim]` float64 of one sequence."""
        count, context = self.sequences[i]
        q = self.q[self.starts[i] : self.starts[i + 1]].double()
        k, v = (
            cache[self.tables[i]].flatten(0, 1)[:context].double()
            for cache in (self.k_cache, self.v_cache)
        )
        grouped = q.view(count, k.shape[1], -1, q.shape[2])
        scores = SCALE * torch.einsum("nhgd,khd->nhgk", grouped, k)
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        distance = torch.arange(context - count, context, device=self.device)[:, None]
        distance = distance - torch.arange(context, device=self.device)
        hidden = (distance < 0) | (distance >= (window or context))
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        return torch.einsum("nhgk,khd->nhgd", scores.softmax(-1), v).reshape(q.shape)
