"""Prefill attention of the CUDA path, as far as a CPU can run it.

FlashAttention's kernel is replaced by what its parameters mean, its call is checked against torch's
own declaration, and the path for float32 runs as it is. `kernels/bench/gpu_check.py` runs all of it
on a GPU.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lorad_kernels import AttentionBatch, gpu_prefill, torch_paths
from torch import Tensor

from lorad.sizing.families import architecture
from lorad.sizing.prefill_memory import prefill_bytes

BLOCK = 16
# Decodes first; then prompts: whole ones, later chunks, one row behind a prefix, and a long one.
SEQUENCES = [(1, 40), (1, 7), (20, 20), (1, 33), (16, 48), (30, 95), (5, 5), (70, 150)]
DECODES = 2
HEADS = [(4, 4), (6, 2), (3, 1)]
# Of values near 1: float32 rounds to 6e-8, bfloat16 to 4e-3, and weights are rounded as well.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclasses.dataclass
class Case:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch

    @classmethod
    def make(cls, heads: int, kv_heads: int, dtype: torch.dtype, dim: int = 32) -> Case:
        """Pages in a random order; whatever is beyond a context is NaN."""
        torch.manual_seed(5)
        blocks = [-(-context // BLOCK) for _, context in SEQUENCES]
        order = torch.randperm(sum(blocks)).split(blocks)
        slab = torch.randn(sum(blocks), 2, 2, BLOCK, kv_heads, dim).to(dtype)
        tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int64)
        for i, pages in enumerate(order):
            tables[i, : len(pages)] = pages
            slab[pages[-1], :, :, (SEQUENCES[i][1] - 1) % BLOCK + 1 :] = torch.nan
        starts = [0]
        for rows, _ in SEQUENCES:
            starts.append(starts[-1] + rows)
        contexts = tuple(context for _, context in SEQUENCES)
        none = torch.empty(0, dtype=torch.int64)
        batch = AttentionBatch(
            tuple(starts), contexts, DECODES, tables, torch.tensor(contexts), none, none
        )
        q = torch.randn(starts[-1], heads, dim).to(dtype)
        return cls(q, slab[:, 1, 0], slab[:, 1, 1], batch)

    def run(self, window: int | None) -> Tensor:
        out = torch.full_like(self.q, torch.nan)
        scale, attend = self.q.shape[2] ** -0.5, gpu_prefill.attention(self.q)
        torch_paths.prefill_all(
            self.q, self.k_cache, self.v_cache, self.batch, out, scale, window, attend
        )
        assert out[:DECODES].isnan().all()
        return out[DECODES:]

    def expected(self, window: int | None) -> Tensor:
        """In float64, a row and a head at a time."""
        out = torch.empty(self.q.shape, dtype=torch.float64)
        group = self.q.shape[1] // self.k_cache.shape[2]
        for i, (rows, context) in enumerate(SEQUENCES):
            k, v = torch_paths.gather(self.k_cache, self.v_cache, self.batch.block_tables[i])
            for row in range(rows):
                t, end = self.batch.query_starts[i] + row, context - rows + row + 1
                seen = slice(max(0, end - window) if window else 0, end)
                for head in range(self.q.shape[1]):
                    keys, values = (x[seen, head // group].double() for x in (k, v))
                    scores = keys @ self.q[t, head].double() * self.q.shape[2] ** -0.5
                    out[t, head] = scores.softmax(0) @ values
        return out[DECODES:]


def kernel_as_declared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
    window_size_left: int | None,
    window_size_right: int | None,
    **others: object,
) -> tuple[Tensor]:
    """FlashAttention 2: row i sees key j where -left <= j - (i + keys - rows) <= right."""
    assert (max_q, max_k, is_causal) == (query.shape[1], key.shape[1], True)
    assert others == {
        "cum_seq_q": None, "cum_seq_k": None, "dropout_p": 0.0, "return_debug_mask": False,
    }  # fmt: skip
    rows = torch.arange(max_q)[:, None] + max_k - max_q
    offsets = torch.arange(max_k) - rows
    mask = offsets <= (window_size_right or 0)
    if window_size_left is not None:
        mask &= offsets >= -window_size_left
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        attn_mask=mask, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return (out.transpose(1, 2),)


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(gpu_prefill, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel_as_declared)


windows = pytest.mark.parametrize("window", [None, 1, 13, 16, 64, 1000])
heads = pytest.mark.parametrize(("heads", "kv_heads"), HEADS)


@windows
@heads
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_masked_is_attention(heads, kv_heads, dtype, window, monkeypatch):
    monkeypatch.setattr(gpu_prefill, "MASKED_ROWS", 24)
    case = Case.make(heads, kv_heads, dtype)
    error = (case.run(window).double() - case.expected(window)).abs().max()
    assert error < TOLERANCE[dtype]


@windows
@heads
def test_flash_is_attention(heads, kv_heads, window, flash):
    case = Case.make(heads, kv_heads, torch.bfloat16)
    error = (case.run(window).double() - case.expected(window)).abs().max()
    assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [None, 13])
def test_flash_is_called_as_torch_declares_it(window):
    q, k = (
        torch.empty(n, h, 64, dtype=torch.bfloat16, device="meta") for n, h in [(5, 6), (40, 2)]
    )
    assert gpu_prefill.flash(q, k, k, 0.125, window).shape == q.shape


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "takes"),
    [
        ((8, 0), torch.bfloat16, 128, True),
        ((9, 0), torch.float16, 64, True),
        ((10, 0), torch.bfloat16, 256, True),
        ((9, 0), torch.float32, 128, False),
        ((7, 5), torch.float16, 128, False),
        ((9, 0), torch.bfloat16, 264, False),
        ((9, 0), torch.bfloat16, 36, False),
        (None, torch.bfloat16, 128, False),
    ],
)
def test_flash_is_for_16_bits_on_what_has_it(capability, dtype, head_dim, takes):
    assert gpu_prefill.takes_flash(capability, dtype, head_dim) is takes


def test_no_plan_is_ever_asked_of_cudnn(monkeypatch):
    """And the mask is no larger than its rows' share, without grouped heads."""
    asked = []
    real = gpu_prefill.scaled_dot_product_attention

    def recorded(q, k, v, **options):
        cuda = torch.backends.cuda
        asked.append((q.shape, k.shape, options["attn_mask"].shape))
        assert not cuda.cudnn_sdp_enabled() and cuda.mem_efficient_sdp_enabled()
        return real(q, k, v, **options)

    monkeypatch.setattr(gpu_prefill, "scaled_dot_product_attention", recorded)
    q, k = torch.randn(300, 6, 32), torch.randn(400, 2, 32)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    gpu_prefill.masked(q, k, k, 1.0, None)
    gpu_prefill.masked(q, k, k, 1.0, 10)
    assert torch.backends.cuda.cudnn_sdp_enabled() is before
    assert [(mask, q[1], k[1]) for q, k, mask in asked] == [
        ((256, 356), 6, 6), ((44, 400), 6, 6), ((256, 265), 6, 6), ((44, 53), 6, 6),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_planned_is_what_is_taken(dtype):
    context, heads = 397, 6
    config = {
        "model_type": "llama", "hidden_size": 96, "num_attention_heads": heads,
        "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1, "vocab_size": 100,
        "intermediate_size": 96, "max_position_embeddings": 512,
    }  # fmt: skip
    pages = torch.zeros(25, BLOCK, 2, 32, dtype=dtype)
    k, v = torch_paths.gather(pages, pages, torch.arange(25))
    taken = k.nbytes + v.nbytes
    if dtype is torch.float32:
        for x in (k, v):
            taken += gpu_prefill._for_all_heads(x[:context], heads).nbytes
        taken += gpu_prefill.MASKED_ROWS * context * (1 + 2 * dtype.itemsize)
    planned = prefill_bytes(architecture(config), 2048, context, BLOCK, dtype.itemsize)
    assert planned == taken
