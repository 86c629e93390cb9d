"""Attention of long, whole prompts by torch: cuDNN's kernel, or FlashAttention's.

These kernels read keys and values from contiguous memory, so the blocks of a prompt are gathered first. Shorter
prompts, and prompts with cached tokens, use Engine's kernel, which reads the blocks in place.

Shapes: T tokens of a prompt, B its blocks, H query heads, G key/value heads, K head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .interface import AttentionLayer, AttentionSpec

logger = logging.getLogger(__name__)

FEWEST_TOKENS: Final = 1024
"""Tokens from which on gathering the blocks takes little of a prompt's time."""

_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
_TOLERANCE = 0.01


class LibraryPrompts:
    """Attention of prompts that begin with their first token, for layers without special scores."""

    def __init__(self, spec: AttentionSpec, backends: Sequence[SDPBackend] = _BACKENDS) -> None:
        self._spec = spec
        self._backends = list(backends)

    def supports(self, layer: AttentionLayer) -> bool:
        """Return whether the layer is plain causal attention: scores are scaled products with all earlier tokens."""
        special = (layer.window, layer.softcap, layer.alibi_slopes_H, layer.sinks_H)
        is_plain = all(x is None for x in special) and layer.kv_scales_2G is None
        return is_plain and self._spec.is_causal

    def attend(self, q_THK: Tensor, kv_cache: Tensor, blocks_B: Tensor, scale: float) -> Tensor:
        """Return the attention output [T, H, K] of a prompt whose keys and values are in these blocks."""
        num_tokens = len(q_THK)
        # [B, 2, G, block size, K] -> [2, G, B * block size, K]
        kv_2GTK = kv_cache.index_select(0, blocks_B).permute(1, 2, 0, 3, 4).flatten(2, 3)
        k_GTK, v_GTK = kv_2GTK[:, :, :num_tokens]
        with sdpa_kernel(self._backends, set_priority=True):
            out_1HTK = F.scaled_dot_product_attention(
                q_THK.transpose(0, 1).unsqueeze(0),
                k_GTK.unsqueeze(0),
                v_GTK.unsqueeze(0),
                is_causal=True,
                scale=scale,
                enable_gqa=self._spec.num_heads != self._spec.num_kv_heads,
            )
        return out_1HTK[0].transpose(0, 1)


def library_prompts(spec: AttentionSpec) -> LibraryPrompts | None:
    """Return torch's attention for a cache; None if it cannot be used on the device, which is logged."""
    is_plain = spec.is_causal and not spec.latent_rank and spec.dtype == torch.bfloat16
    if spec.device.type != "cuda" or not is_plain:
        return None
    return LibraryPrompts(spec) if _is_right(spec) else None


@cache
def _is_right(spec: AttentionSpec) -> bool:
    fault = find_fault(LibraryPrompts(spec), spec)
    if fault is None:
        logger.info("attention of long prompts uses torch's cuDNN or FlashAttention")
    else:
        logger.info("attention of long prompts uses Engine's kernel: %s", fault)
    return fault is None


def find_fault(library: LibraryPrompts, spec: AttentionSpec) -> str | None:
    """Test `library` with the attention of a short random prompt. Return why it cannot be used, or None."""
    num_tokens, num_blocks = 3 * spec.block_size - 1, 3
    dtype, device = spec.dtype, spec.device
    assert isinstance(dtype, torch.dtype) and isinstance(device, torch.device)
    random = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    q_THK = numbers(num_tokens, spec.num_heads, spec.head_dim)
    cache = numbers(num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
    blocks_B = torch.tensor([2, 0, 1], device=device)
    try:
        found_THK = library.attend(q_THK, cache, blocks_B, 0.1).float()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    k_TGK, v_TGK = cache[blocks_B].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_tokens].float()
    repeats = spec.num_heads // spec.num_kv_heads
    k_THK, v_THK = (x.repeat_interleave(repeats, 1) for x in (k_TGK, v_TGK))
    scores_HTT = torch.einsum("thk,lhk->htl", q_THK.float(), k_THK) * 0.1
    is_later_TT = torch.ones(num_tokens, num_tokens, device=device).triu(1).bool()
    weights_HTT = scores_HTT.masked_fill(is_later_TT, -torch.inf).softmax(-1)
    expected_THK = torch.einsum("htl,lhk->thk", weights_HTT, v_THK)
    difference = float((found_THK - expected_THK).norm() / expected_THK.norm())
    # A NaN is also wrong.
    return None if difference < _TOLERANCE else f"its error is {difference:.3g}"
