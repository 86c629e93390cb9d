"""The description of a decoder-only model as data."""

from dataclasses import dataclass
from typing import Literal

import torch

from ...protocol.checkpoint.model_dimensions import ModelDimensions
from .rope import RopeSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties that differ between layers.

    A token at position p attends to positions p - window + 1 .. p, or to 0 .. p if `window` is None. `rope` is None for
    layers without position encoding. `kv_cache_group` is the index of the block table that the layer reads.
    """

    rope: RopeSpec | None
    window: int | None = None
    kv_cache_group: int = 0


@dataclass(frozen=True, slots=True)
class NormNames:
    """The checkpoint's name of each norm of a layer; None where the family has none."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model.

    `norm_weight_offset` is added to every norm weight (Gemma stores weight - 1). `qk_norm` is
    "head" (one norm over each head) or "full" (one norm over all heads). With `fused_projections`
    the checkpoint stores `qkv_proj` and `gate_up_proj`. Hidden states are multiplied by
    `embedding_scale` after the embedding and every block's output by `residual_multiplier` before
    it is added; logits are divided by `logits_divisor`, then capped to +-`final_softcap`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    norm_eps: float
    attention_scale: float
    tie_word_embeddings: bool
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norms: NormNames = NormNames()
    norm_weight_offset: float = 0.0
    qk_norm: Literal["head", "full"] | None = None
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    fused_projections: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0

    def rounded_embedding_scale(self, dtype: torch.dtype) -> float:
        """Return the scale rounded to `dtype`, as it was when the model was trained."""
        return torch.tensor(self.embedding_scale, dtype=dtype).item()

    @property
    def windows_by_group(self) -> tuple[frozenset[int | None], ...]:
        """Return the attention windows of the layers of each KV-cache group."""
        num_groups = 1 + max(layer.kv_cache_group for layer in self.layers)
        return tuple(
            frozenset(layer.window for layer in self.layers if layer.kv_cache_group == group)
            for group in range(num_groups)
        )

    @property
    def dimensions(self) -> ModelDimensions:
        """The sizes that determine how the model can be divided."""
        return ModelDimensions(
            len(self.layers),
            self.num_heads,
            self.num_kv_heads,
            self.intermediate_size,
            self.vocab_size,
        )
