"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lorad_kernels import Draws, draw_tokens, greedy_tokens, take_rows
from torch import Tensor

from lorad.engine.messages import TokenLogprob
from lorad.engine.request import Sequence

# A temperature below this is greedy: nothing but the likeliest token would be left, and
# dividing by it overflows.
_GREEDY_BELOW = 1e-5
_F64 = torch.float64
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
    rows = [i for i, token in enumerate(tokens) if token >= 0]
    for i, token in _choose(logits, rows, sequences).items():
        tokens[i] = token
    reports = _logprobs(logits, rows, sequences, tokens)
    return [Sampled(None if token < 0 else token, reports.get(i)) for i, token in enumerate(tokens)]


def _choose(logits: Tensor, rows: list[int], sequences: list[Sequence]) -> dict[int, int]:
    """Tokens of the rows for which the likeliest is not the answer already."""
    changed = [i for i in rows if _changes(sequences[i])]
    chosen = _draw(logits, {i: i for i in rows if not _changes(sequences[i])}, sequences)
    if changed:
        scores = take_rows(logits, _index(changed, logits), torch.float32)
        for row, i in enumerate(changed):
            _change(scores[row], sequences[i])
        # A penalty below 1 can make infinity of a large one.
        scores.clamp_(max=_LARGEST)
        chosen |= dict(zip(changed, greedy_tokens(scores).tolist(), strict=True))
        chosen |= _draw(scores, {i: row for row, i in enumerate(changed)}, sequences)
    return chosen


def _draw(logits: Tensor, rows: dict[int, int], sequences: list[Sequence]) -> dict[int, int]:
    """A draw for each sequence that is not greedy; `rows` are those of sequences in logits."""
    drawn = [i for i in rows if not _is_greedy(sequences[i])]
    if not drawn:
        return {}
    if len(drawn) < len(logits):
        logits = take_rows(logits, _index([rows[i] for i in drawn], logits))
    params = [sequences[i].request.sampling for i in drawn]
    draws = Draws(
        torch.tensor([each.temperature for each in params], dtype=_F64),
        torch.tensor([each.top_k for each in params], dtype=torch.int64),
        torch.tensor([each.top_p for each in params], dtype=_F64),
        torch.tensor([each.min_p for each in params], dtype=_F64),
        torch.cat([torch.rand(1, generator=sequences[i].generator, dtype=_F64) for i in drawn]),
    )
    return dict(zip(drawn, draw_tokens(logits, draws).tolist(), strict=True))


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)


def _is_greedy(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature < _GREEDY_BELOW


def _changes(sequence: Sequence) -> bool:
    """Whether the request changes its logits before a token is chosen."""
    params = sequence.request.sampling
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
    )


def _change(scores: Tensor, sequence: Sequence) -> None:
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


def _logprobs(
    logits: Tensor, rows: list[int], sequences: list[Sequence], tokens: list[int]
) -> dict[int, TokenLogprob]:
    """Of the raw distribution, before temperature and truncation, for those who ask."""
    wanted = {i: sequences[i].request.sampling.logprobs for i in rows}
    counts = {i: count for i, count in wanted.items() if count is not None}
    if not counts:
        return {}
    asked = list(counts)
    scores = take_rows(logits, _index(asked, logits), torch.float32)
    mass = scores.logsumexp(-1, keepdim=True)
    chosen = _index([tokens[i] for i in asked], logits)
    own = (scores.gather(-1, chosen[:, None]) - mass)[:, 0].tolist()
    values, ids = scores.topk(min(max(counts.values()), scores.shape[1]))
    values -= mass
    best = [
        tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return {
        i: TokenLogprob(tokens[i], own[row], best[row][: counts[i]]) for row, i in enumerate(asked)
    }
