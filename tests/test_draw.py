"""Drawing tokens: the CPU's kernel and the reference, against float64, one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lorad_kernels import Draws, cpu_draw, draw_tokens, reference
from torch import Tensor

IMPLEMENTATIONS = [cpu_draw, reference]
ROUNDING = 1e-5


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.manual_seed(5)
    torch.set_num_threads(2)


def draws_of(rows: int, uniform: list[float], **params: float) -> Draws:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    return Draws(
        *(
            torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else torch.float64)
            for name, value in values.items()
        ),
        torch.tensor(uniform, dtype=torch.float64),
    )


def weights_of(row: Tensor, temperature: float) -> np.ndarray:
    scores = row.double().numpy()
    with np.errstate(under="ignore", over="ignore"):
        return np.exp((scores - scores.max()) / temperature)


def kept(weights: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    ordered = np.sort(weights)[::-1]
    least = ordered[min(top_k, len(ordered)) - 1] if top_k else 0.0
    left = ordered[ordered >= least]
    target = max(top_p * left.sum(), np.finfo(float).tiny)
    # A weight stays when those above it, but for its equals, do not hold the target yet.
    above = {w: left[left > w].sum() for w in np.unique(left)}
    least = min(w for w, mass in above.items() if mass < target)
    return weights >= max(least, min_p)


def check(row: Tensor, token: int, uniform: float, **params: float) -> None:
    """The token holds the place `uniform` among those kept, up to rounding."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    weights = weights_of(row, values.pop("temperature"))
    tight, loose = (
        kept(weights, values["top_k"], values["top_p"] + d, max(0.0, values["min_p"] - d))
        for d in (-ROUNDING, ROUNDING)
    )
    assert loose[token], "outside of what is kept"
    for mask in (tight, loose):
        inside = np.where(mask, weights, 0)
        sums = inside.cumsum() / inside.sum()
        if (
            sums[token] - inside[token] / inside.sum() - ROUNDING
            <= uniform
            <= (sums[token] + ROUNDING)
        ):
            return
    raise AssertionError("another token holds this place")


PARAMS = [
    {},
    {"temperature": 0.4},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 40, "temperature": 2.0},
    {"top_p": 0.3},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_p": 0.999, "temperature": 5.0},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"top_k": 200, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
    {"top_k": 10**6},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("width", [1, 7, 16, 513, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ours", IMPLEMENTATIONS, ids=["kernel", "reference"])
def test_a_token_holds_its_place(ours, dtype, width, params) -> None:
    uniform = [0.0, 0.1, 0.5, 0.77, 0.999, 1 - 2**-53]
    rows = (torch.randn(len(uniform), width) * 3).to(dtype)
    tokens = ours.draw_tokens(rows, draws_of(len(uniform), uniform, **params))
    for row, token, u in zip(rows, tokens.tolist(), uniform, strict=True):
        check(row, token, u, **params)


@given(
    seed=st.integers(0, 999),
    temperature=st.floats(0.05, 4),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=150, deadline=None)
def test_the_kernel_and_the_reference_agree(seed, temperature, top_k, top_p, min_p, uniform):
    row = torch.randn(1, 33, generator=torch.Generator().manual_seed(seed)) * 2
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for ours in IMPLEMENTATIONS:
        [token] = ours.draw_tokens(row, draws_of(1, [uniform], **params)).tolist()
        check(row[0], token, uniform, **params)


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9999}, {"top_k": 49_000}, {"top_k": 9, "top_p": 0.5}]
)
@pytest.mark.parametrize("ours", IMPLEMENTATIONS, ids=["kernel", "reference"])
def test_a_flat_distribution_of_many_equals(ours, params) -> None:
    """Nearly all weights stay: there is no floor to cut most of them off with."""
    uniform = [0.0, 0.3, 0.6, 0.9999]
    rows = torch.randint(3, (4, 50_000)).to(torch.bfloat16) * 1e-2
    tokens = ours.draw_tokens(rows, draws_of(4, uniform, **params)).tolist()
    for row, token, u in zip(rows, tokens, uniform, strict=True):
        check(row, token, u, **params)


@pytest.mark.parametrize("ours", IMPLEMENTATIONS, ids=["kernel", "reference"])
def test_equals_of_the_last_one_kept_are_kept(ours) -> None:
    row = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    for params in ({"top_k": 1}, {"top_k": 2}, {"top_p": 1e-6}, {"min_p": 1.0}):
        drawn = [int(ours.draw_tokens(row, draws_of(1, [u], **params))) for u in (0, 0.34, 0.99)]
        assert drawn == [1, 2, 4], params


@pytest.mark.parametrize("ours", IMPLEMENTATIONS, ids=["kernel", "reference"])
def test_what_has_no_weight_is_never_drawn(ours) -> None:
    row = torch.full((1, 40), -torch.inf)
    row[0, [3, 21]] = torch.tensor([-1.0, -1.0])
    drawn = {int(ours.draw_tokens(row, draws_of(1, [u]))) for u in (0.0, 0.3, 0.6, 1 - 2**-53)}
    assert drawn == {3, 21}


def test_a_row_does_not_notice_its_neighbours() -> None:
    rows = (torch.randn(9, 1000) * 2).to(torch.bfloat16)
    uniform = torch.rand(9, dtype=torch.float64).tolist()
    together = draw_tokens(rows, draws_of(9, uniform, top_p=0.8))
    alone = [
        int(draw_tokens(rows[i : i + 1], draws_of(1, [u], top_p=0.8)))
        for i, u in enumerate(uniform)
    ]
    assert together.tolist() == alone


def test_settings_are_one_for_each_row() -> None:
    with pytest.raises(ValueError, match="a setting for each row"):
        draw_tokens(torch.zeros(2, 5), draws_of(1, [0.5]))


def test_dtypes_without_a_kernel_are_drawn_from_too() -> None:
    rows = torch.randn(3, 100).to(torch.float16)
    tokens = draw_tokens(rows, draws_of(3, [0.2, 0.5, 0.9]))
    for row, token, u in zip(rows, tokens.tolist(), [0.2, 0.5, 0.9], strict=True):
        check(row, token, u)
