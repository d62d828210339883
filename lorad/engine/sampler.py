"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lorad_kernels import greedy_tokens
from torch import Tensor

from lorad.engine.messages import SamplingParams, TokenLogprob
from lorad.engine.request import Sequence

# A temperature below this is greedy: nothing but the likeliest token would be left, and
# dividing by it overflows.
_GREEDY_BELOW = 1e-5
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token; `token_id` None means the logits held NaN or infinity."""

    token_id: int | None
    logprob: TokenLogprob | None = None


def sample(
    logits: Tensor, sequences: list[Sequence], greedy: Tensor | None = None
) -> list[Sampled]:
    """logits `[S, vocab]`, one row per sequence, any float dtype; `greedy` if known already."""
    tokens = (greedy_tokens(logits) if greedy is None else greedy).tolist()
    return [
        Sampled(None) if token < 0 else _choose(logits[i], token, sequence)
        for i, (token, sequence) in enumerate(zip(tokens, sequences, strict=True))
    ]


def _choose(row: Tensor, greedy: int, sequence: Sequence) -> Sampled:
    params = sequence.request.sampling
    token = greedy if _is_plain_greedy(params) else _draw(row, sequence)
    if params.logprobs is None:
        return Sampled(token)
    return Sampled(token, _logprob(row, token, params.logprobs))


def _is_plain_greedy(params: SamplingParams) -> bool:
    return (
        params.temperature < _GREEDY_BELOW
        and not params.logit_bias
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.repetition_penalty == 1
    )


def _draw(row: Tensor, sequence: Sequence) -> int:
    params = sequence.request.sampling
    scores = _with_penalties(row.float().clone(), sequence)
    if params.temperature < _GREEDY_BELOW:
        return int(scores.argmax())
    # The largest becomes 0 before the division, so that no quotient is above the range.
    scores = scores.clamp(max=_LARGEST)
    scores = (scores - scores.max()) / params.temperature
    probabilities = _truncate(scores.softmax(-1), params).cpu()
    return int(torch.multinomial(probabilities, 1, generator=sequence.generator))


def _with_penalties(scores: Tensor, sequence: Sequence) -> Tensor:
    """Bias and penalties as OpenAI (presence, frequency) and CTRL (repetition) define them."""
    params = sequence.request.sampling
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=scores.device)
        old = scores[seen]
        scores[seen] = torch.where(
            old > 0, old / params.repetition_penalty, old * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(sequence.output, dtype=torch.int64, device=scores.device)
        ids, counts = output.unique(return_counts=True)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor([token for token, _ in params.logit_bias], device=scores.device)
        scores[ids] += torch.tensor([b for _, b in params.logit_bias], device=scores.device)
    return scores


def _truncate(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """Keep top-k, then the nucleus of top-p, then what min-p allows. Not renormalised."""
    if params.top_k:
        k = min(params.top_k, probabilities.numel())
        least = probabilities.topk(k).values[-1]
        probabilities = probabilities.where(probabilities >= least, 0)
    if params.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # A token stays when those before it do not yet hold top_p of the mass.
        outside = ordered.cumsum(-1) - ordered >= params.top_p * ordered.sum()
        outside[0] = False  # for a top_p that is 0 in float32
        probabilities[order[outside]] = 0
    if params.min_p > 0:
        probabilities = probabilities.where(probabilities >= params.min_p * probabilities.max(), 0)
    return probabilities


def _logprob(row: Tensor, token: int, alternatives: int) -> TokenLogprob:
    """Of the raw distribution, before temperature and truncation."""
    scores = row.float().log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        values, ids = scores.topk(min(alternatives, scores.numel()))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(scores[token]), top)
