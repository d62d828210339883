"""Attention of prefills on CUDA, by those of torch's kernels that this file names.

Left to choose, torch takes for rows that continue a context, or that have a window, what accepts
a mask: cuDNN, which makes a plan for each shape that it has not met and holds up the step for it,
or plain matmuls, which write out every head's scores. FlashAttention (Dao, arXiv:2307.08691)
needs no mask: rows at the end of a context, grouped heads and windows are its own parameters.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lorad_kernels.reference import visible
from lorad_kernels.torch_paths import Attend, first_visible

# Rows that share one mask in `masked`: it is as large as they and their context.
MASKED_ROWS = 256

_FLASH_SINCE = (8, 0)  # compute capability
_FLASH_WIDEST_HEAD = 256


def attention(q: Tensor) -> Attend:
    """What computes the prefills of queries like these, `[T, heads, head_dim]`."""
    return flash if takes_flash(_capability(q.device), q.dtype, q.shape[2]) else masked


def takes_flash(capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `flash` computes this; `capability` is None where there is no CUDA device."""
    half = dtype in (torch.bfloat16, torch.float16)
    fits = head_dim % 8 == 0 and head_dim <= _FLASH_WIDEST_HEAD
    return capability is not None and capability >= _FLASH_SINCE and half and fits


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Rows `[n, heads, dim]` that see K and V `[keys, kv_heads, dim]` up to their own, the last n.

    `torch.nn.attention.bias.causal_lower_right` comes to the same kernel without windows, but
    keeps a tensor of two floats per row and key on the host. This call is the same since torch 2.9.
    """
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q[None], k[None], v[None],
        cum_seq_q=None, cum_seq_k=None, max_q=q.shape[0], max_k=k.shape[0],
        dropout_p=0.0, is_causal=True, return_debug_mask=False, scale=scale,
        window_size_left=window - 1 if window else None,  # keys before a row's own
        window_size_right=0 if window else None,
    )[0]  # fmt: skip
    return out[0]


def masked(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """The same in float32, and where there is no FlashAttention.

    The memory-efficient kernel takes a mask, but no groups: K and V are repeated for all heads.
    """
    k, v = (_for_all_heads(x, q.shape[1]) for x in (k, v))
    before = k.shape[0] - q.shape[0]
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], MASKED_ROWS):
        rows = q[start : start + MASKED_ROWS]
        stop = start + len(rows)
        keys = slice(first_visible(len(rows), before + stop, window), before + stop)
        mask = visible(len(rows), keys.stop - keys.start, window, q.device)
        out[start:stop] = _attention(rows, k[keys], v[keys], mask, scale)
    return out


def _for_all_heads(x: Tensor, heads: int) -> Tensor:
    return x[:, :, None].expand(-1, -1, heads // x.shape[1], -1).flatten(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)
