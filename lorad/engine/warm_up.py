"""One step that launches every kernel of eager steps, so that none is compiled in a later one."""

from __future__ import annotations

from itertools import accumulate

from lorad_kernels import AdapterFactors, LoraFactors, group_rows

from lorad.engine.step_inputs import StepInputs
from lorad.sizing.model_shape import ModelShape

# What an adapter of rank 1 would be whose factors all lie at the slab's start. Other ranks and
# places are no other kernels.
_ANYWHERE = LoraFactors(rank=1, scaling=1.0, a_offset=0, b_offset=0)


def warm_up_step(
    shape: ModelShape, block_size: int, most_rows: int, max_model_len: int
) -> StepInputs:
    """A decode, the rest of a short prompt and a whole long one, all with an adapter.

    `most_rows` is of `group_rows`. The three share the slab's first pages, and what lies there is
    overwritten. The results mean nothing.
    """
    counts = [1, min(2, max_model_len), min(most_rows + 1, max_model_len)]
    contexts = [1, min(3, max_model_len), counts[2]]
    positions = [
        position
        for count, context in zip(counts, contexts, strict=True)
        for position in range(context - count, context)
    ]
    ends = list(accumulate(counts))
    return StepInputs(
        token_ids=[0] * len(positions),
        positions=positions,
        kv_pages=[position // block_size for position in positions],
        kv_offsets=[position % block_size for position in positions],
        query_starts=[0, *ends],
        context_lens=contexts,
        block_tables=[list(range(-(-context // block_size))) for context in contexts],
        logits_rows=[end - 1 for end in ends],
        segments=group_rows([0] * len(counts), counts, most_rows),
        adapters=[_adapter(shape)],
    )


def _adapter(shape: ModelShape) -> AdapterFactors:
    layer = [[_ANYWHERE for _ in projection.slices] for projection in shape.projections]
    return [layer] * shape.num_layers
