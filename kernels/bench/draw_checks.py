"""Drawn tokens of the device against those of the CPU, from the same numbers."""

from __future__ import annotations

import torch
from lorad_kernels import Draws, draw_tokens
from report import Report

ROWS, VOCABULARY = 64, 20_000
# Few rows may have a number so near the border of two tokens that rounding decides.
AGREE = ROWS - 1


def check_drawing(report: Report, device: torch.device) -> None:
    """Each way of truncating, and none; bfloat16 logits, with many equals among them."""
    logits = (torch.randn(ROWS, VOCABULARY) * 3).to(torch.bfloat16)
    cases: list[tuple[float, int, float, float]] = [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 0.9, 0.0),
        (0.8, 50, 1.0, 0.0),
        (2.0, 200, 0.8, 0.02),
    ]
    for temperature, top_k, top_p, min_p in cases:
        draws = Draws(
            torch.full((ROWS,), temperature, dtype=torch.float64),
            torch.full((ROWS,), top_k),
            torch.full((ROWS,), top_p, dtype=torch.float64),
            torch.full((ROWS,), min_p, dtype=torch.float64),
            torch.rand(ROWS, dtype=torch.float64),
        )
        got = draw_tokens(logits.to(device), draws).cpu()
        same = int((got == draw_tokens(logits, draws)).sum())
        what = f"drawing at {temperature}, {top_k}, {top_p}, {min_p}"
        report.check(same >= AGREE, f"{what}: {same} of {ROWS} tokens are the CPU's")
