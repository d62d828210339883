"""The sampler against a plain definition in float64, one probability at a time."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorad.engine.messages import GenerationRequest, SamplingParams
from lorad.engine.request import Sequence
from lorad.engine.sampler import sample

torch.set_num_threads(1)
VOCAB = 12
PROMPT = (3, 7, 7, 1)
OUTPUT = (2, 2, 2, 5)


def sequence(output: tuple[int, ...] = OUTPUT, **params) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 9, **params})
    made = Sequence.from_request(GenerationRequest("r", PROMPT, sampling))
    made.tokens += output
    return made


def logits(rows: int = 1, seed: int = 0, spread: float = 3.0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def tokens(row: Tensor, rows: int, **params) -> list[int | None]:
    """`rows` draws from the same logits."""
    sampled = sample(row.expand(rows, -1), [sequence(**params) for _ in range(rows)])
    return [each.token_id for each in sampled]


def definition(row: Tensor, params: SamplingParams, output: tuple[int, ...] = OUTPUT) -> np.ndarray:
    """The distribution a token is drawn from; one-hot at temperature 0."""
    scores = row.double().numpy().copy()
    for token in {*PROMPT, *output}:  # CTRL, Keskar et al., arXiv:1909.05858
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(output).items():  # OpenAI: only what has been generated counts
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.temperature == 0:
        return np.eye(len(scores))[scores.argmax()]
    weights = np.exp((scores - scores.max()) / params.temperature)
    if params.top_k:
        weights[weights < sorted(weights)[-min(params.top_k, len(weights))]] = 0
    before = 0.0
    total = weights.sum()
    for token in sorted(range(len(weights)), key=lambda t: -weights[t]):
        share = weights[token] / total
        if before >= params.top_p:
            weights[token] = 0
        before += share
    weights[weights < params.min_p * weights.max()] = 0
    return weights / weights.sum()


# --- greedy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_temperature_zero_takes_the_likeliest(dtype: torch.dtype) -> None:
    many = logits(50, vocab=300).to(dtype)
    sampled = sample(many, [sequence(temperature=0.0) for _ in range(50)])
    for row, each in zip(many, sampled, strict=True):
        assert row[each.token_id] == row.max()


@given(
    seed=st.integers(0, 999),
    repetition=st.sampled_from([1.0, 0.5, 1.3, 3.0]),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple),
)
@settings(max_examples=150, deadline=None)
def test_the_likeliest_after_penalties_and_bias(
    seed, repetition, presence, frequency, bias, output
) -> None:
    one = sequence(
        output,
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
    )
    row = logits(seed=seed)
    expected = int(definition(row[0], one.request.sampling, output).argmax())
    assert sample(row, [one])[0].token_id == expected


# --- drawing ----------------------------------------------------------------------------------

DRAWS = 2500
CASES = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top-k": {"top_k": 3, "temperature": 1.5},
    "top-k of all": {"top_k": VOCAB + 5},
    "top-p": {"top_p": 0.7, "temperature": 1.5},
    "min-p": {"min_p": 0.2, "temperature": 1.5},
    "all three": {"top_k": 6, "top_p": 0.9, "min_p": 0.05, "temperature": 2.0},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    "bias": {"logit_bias": ((0, 4.0), (6, -3.0)), "top_p": 0.95},
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_draws_follow_the_defined_distribution(params) -> None:
    """Within five standard deviations of each token's share; nothing from outside."""
    torch.manual_seed(1)
    row = logits(seed=4, spread=1.5)
    expected = definition(row[0], SamplingParams(9, **params))
    drawn = Counter(tokens(row, DRAWS, **params))
    for token, share in enumerate(expected):
        if share == 0:
            assert drawn[token] == 0, f"token {token} was cut off"
        spread = math.sqrt(DRAWS * share * (1 - share))
        assert abs(drawn[token] - DRAWS * share) <= 5 * spread + 1


@given(
    seed=st.integers(0, 999),
    temperature=st.floats(0.05, 2),
    top_k=st.integers(0, VOCAB + 1),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_drawn_from_outside(seed, temperature, top_k, top_p, min_p) -> None:
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    row = logits(seed=seed)
    expected = definition(row[0], SamplingParams(9, **params))
    # A token whose share is within rounding of a bound may fall on either side.
    tolerant = definition(
        row[0],
        SamplingParams(9, temperature, min(1, top_p + 1e-5), top_k, min_p=max(0, min_p - 1e-5)),
    )
    drawn = set(tokens(row, 20, **params))
    assert drawn <= {t for t in range(VOCAB) if expected[t] > 0 or tolerant[t] > 0}


def test_top_k_of_one_and_a_tiny_top_p_are_greedy() -> None:
    many = logits(20)
    best = many.argmax(-1).tolist()
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        sampled = sample(many, [sequence(temperature=2.0, **params) for _ in range(20)])
        assert [each.token_id for each in sampled] == best


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-6},
        {"temperature": 1e-38},
        {"temperature": 1e-300},
        {"top_p": 1e-50},
        {"top_p": 5e-324},
        {"temperature": 1e-38, "top_k": 5, "top_p": 1e-40, "min_p": 1.0},
        {"temperature": 1e-38, "presence_penalty": 2.0},
    ],
    ids=str,
)
def test_values_next_to_zero_are_greedy_and_fail_nobody(params) -> None:
    """They are legal in a request; an exception here would end every request of the step."""
    row = logits(spread=20.0)
    expected = int(definition(row[0], SamplingParams(9, **{**params, "temperature": 0})).argmax())
    assert tokens(row, 3, **params) == [expected] * 3


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"temperature": 1e-4}, {"top_k": 2}])
def test_logits_at_the_end_of_the_range_can_be_drawn_from(params) -> None:
    """A penalty below 1 makes infinity of them; the row is still one request's own affair."""
    row = torch.tensor([[3e38, 1.0, -3e38, 2.0]])
    one = sequence((0,), repetition_penalty=0.01, **params)
    one.tokens = [0, 2]
    assert sample(row, [one])[0].token_id == 0


def test_logits_of_minus_infinity_are_never_drawn() -> None:
    row = logits()
    row[0, ::2] = -torch.inf
    assert all(token % 2 for token in tokens(row, 50, temperature=2.0))


# --- seeds ------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_again() -> None:
    many = logits(30, spread=0.5)

    def run(seed: int) -> list[int | None]:
        one = sequence(seed=seed)
        return [sample(row[None], [one])[0].token_id for row in many]

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(2**63 - 1) == run(2**63 - 1)


def test_a_seeded_request_does_not_notice_its_neighbours() -> None:
    """Alone, at any row of a batch, among seeded and unseeded ones, whatever torch's own state."""
    steps = [logits(5, seed=i, spread=0.5) for i in range(12)]
    alone = sequence(seed=11)
    expected = [sample(rows[:1], [alone])[0].token_id for rows in steps]
    assert len(set(expected)) > 3
    for place in range(3):
        torch.manual_seed(place)
        others = [sequence(seed=5), sequence(), sequence(temperature=0.0)]
        mine = sequence(seed=11)
        batch = [*others[:place], mine, *others[place:]]
        drawn = []
        for rows in steps:
            mixed = torch.cat([rows[1 : 1 + place], rows[:1], rows[1 + place : 4]])
            drawn.append(sample(mixed, batch)[place].token_id)
        assert drawn == expected


def test_without_a_seed_two_requests_differ() -> None:
    row = logits(spread=0.1)
    assert len(set(tokens(row, 40))) > 4


# --- log-probabilities ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.7, "top_k": 2, "presence_penalty": 2.0},
        {"logit_bias": ((4, 100.0),)},
    ],
)
def test_logprobs_are_of_the_raw_distribution(dtype, params) -> None:
    row = logits(vocab=40).to(dtype)
    exact = row[0].double().log_softmax(-1)
    for count in (0, 3, 40, 99):
        [got] = sample(row, [sequence(logprobs=count, **params)])
        assert got.logprob.token_id == got.token_id
        assert got.logprob.logprob == pytest.approx(float(exact[got.token_id]), abs=1e-5)
        assert len(got.logprob.top) == min(count, 40)
        best = exact.sort(descending=True).values[: min(count, 40)].tolist()
        assert [value for _, value in got.logprob.top] == pytest.approx(best, abs=1e-5)
        for token, value in got.logprob.top:
            assert value == pytest.approx(float(exact[token]), abs=1e-5)
        assert len({token for token, _ in got.logprob.top}) == len(got.logprob.top)


def test_no_logprobs_unless_they_are_asked_for() -> None:
    assert sample(logits(), [sequence()])[0].logprob is None


# --- broken rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"logprobs": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_row_has_no_token_and_spoils_no_other(params, dtype) -> None:
    rows = logits(6).to(dtype)
    expected = sample(rows, [sequence(seed=1, **params) for _ in range(6)])
    rows[1, 4] = torch.nan
    rows[2] = torch.nan
    rows[3, 0] = torch.inf
    rows[5] = -torch.inf
    got = sample(rows, [sequence(seed=1, **params) for _ in range(6)])
    assert [each.token_id is None for each in got] == [False, True, True, True, False, True]
    assert got[0] == expected[0]
    assert got[4] == expected[4]


def test_the_logits_are_left_as_they_are() -> None:
    rows = logits(3)
    before = rows.clone()
    sample(rows, [sequence(repetition_penalty=2.0, logit_bias=((1, 5.0),)) for _ in range(3)])
    assert torch.equal(rows, before)
