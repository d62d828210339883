"""One sequence inside the engine: its tokens so far and the pages that hold their K and V."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from lorad.engine.messages import FinishReason, GenerationRequest
from lorad.memory.prefix_cache import BlockChain
from lorad.wire import BASE_WORD


@dataclass(slots=True, eq=False)
class Sequence:
    """Grows by one token per decode step. `tokens[:num_computed]` have K and V in pages."""

    request: GenerationRequest
    tokens: list[int]
    prompt_length: int
    generator: torch.Generator | None
    arrived_at: float = field(default_factory=time.monotonic)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    started: bool = False  # has run before; true also while it is preempted
    use_counted: bool = False  # one request is one use of its adapter, however often it begins
    chain: BlockChain | None = None  # given by the scheduler
    cached_tokens: int | None = None  # of the prompt, known once it has been admitted

    @classmethod
    def from_request(cls, request: GenerationRequest) -> Sequence:
        tokens = list(request.prompt_token_ids)
        seed = request.sampling.seed
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return cls(request, tokens, len(tokens), generator)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def digest(self) -> str | None:
        """The adapter's content, or None for the base model."""
        return self.request.adapter.digest if self.request.adapter else None

    @property
    def label(self) -> str:
        return str(self.request.adapter) if self.request.adapter else BASE_WORD

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_pending(self) -> int:
        """Tokens whose K and V are still to be computed: 1 in decode, more in prefill."""
        return len(self.tokens) - self.num_computed

    @property
    def tokens_left(self) -> int:
        return self.request.sampling.max_tokens - self.num_output

    def finish_reason(
        self, eos_token_ids: frozenset[int], max_model_len: int
    ) -> FinishReason | None:
        """Whether the newest token ends the sequence."""
        sampling, last = self.request.sampling, self.tokens[-1]
        if last in sampling.stop_token_ids or (not sampling.ignore_eos and last in eos_token_ids):
            return "stop"
        if self.tokens_left <= 0 or len(self.tokens) >= max_model_len:
            return "length"
        return None
