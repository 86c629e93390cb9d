"""The layers of a vision tower as a native program.

Shapes: P patches of an image and the class token, D hidden size of the tower.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from ...protocol.checkpoint.vision.spec import VisionSpec
from ..attention.interface import AttentionSpec
from ..batch import AttentionBatch
from ..layers.spec import Activation, LayerSpec, ModelSpec, NormNames
from ..loaders import Checkpoint
from ..parallel.shard import ModelShard
from .attention import NativeAttention
from .decoder import NativeDecoder
from .library import NotSupportedNatively

_BLOCK_SIZE: Final = 64
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "relu": "relu",
}
_NAMES: Final = (
    (r".*embeddings\.patch_embedding\.weight$", "embed_tokens.weight"),
    (r"\.layer_norm1\.", ".input_layernorm."),
    (r"\.layer_norm2\.", ".post_attention_layernorm."),
    (r"\.output_norm1\.", ".attention_output_norm."),
    (r"\.output_norm2\.", ".mlp_output_norm."),
    (r"\.out_proj\.", ".o_proj."),
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    (r"^(?!layers\.|embed_tokens\.).*", ""),
)
"""Names of CLIP's tensors in a decoder."""


class NativeVisionLayers:
    """The layers of `spec`, which run as the middle stage of an encoder: from hidden states to hidden states.

    Raises:
        NotSupportedNatively: The program has no operation for a part of the layers.
        CheckpointError: A tensor is missing or has another shape.
    """

    def __init__(self, spec: VisionSpec, checkpoint: Checkpoint, num_threads: int) -> None:
        model = _model_spec(spec)
        num_layers = len(model.layers) - 2
        shard = ModelShard(range(1, 1 + num_layers), len(model.layers))
        attention = AttentionSpec(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_heads,
            head_dim=spec.size_of_heads,
            block_size=_BLOCK_SIZE,
            dtype=torch.float32,
            device=torch.device("cpu"),
            is_causal=False,
        )
        self._attention = NativeAttention(attention)
        self._decoder = NativeDecoder(
            model,
            checkpoint,
            self._attention,
            dtype=torch.float32,
            max_model_len=spec.num_patches + 1,
            shard=shard,
            num_threads=num_threads,
        )
        # A layer stores the keys and values of all patches before it reads any, so one cache is enough.
        num_blocks = -(-(spec.num_patches + 1) // _BLOCK_SIZE)
        cache = torch.zeros(self._attention.kv_cache_shape(num_blocks))
        self._kv_caches = [cache] * num_layers

    def __call__(self, x_PD: Tensor) -> Tensor:
        """Return the hidden states after the layers, float32."""
        num_patches = len(x_PD)
        places = np.arange(num_patches, dtype=np.int32)
        batch = AttentionBatch(
            query_start_loc=np.array([0, num_patches], np.int32),
            seq_lens=np.array([num_patches], np.int32),
            block_table=np.arange(-(-num_patches // _BLOCK_SIZE), dtype=np.int32)[None],
            slot_mapping=places,
        )
        metadata = self._attention.build(batch, {None})
        return self._decoder.forward(x_PD, torch.from_numpy(places), self._kv_caches, [metadata])


def _model_spec(spec: VisionSpec) -> ModelSpec:
    """Return the layers as those of a model, in which a layer is before them and another after them."""
    features = {
        "rotary positions of patches": spec.rope_theta,
        "features of several layers": len(spec.feature_layers) > 1,
        "factors on outputs": spec.has_layer_scales,
        "norms of values": spec.has_value_norm,
        "bounds of products": spec.clips_products,
        f"the activation {spec.activation}": spec.activation not in _ACTIVATIONS,
    }
    for feature, is_used in features.items():
        if is_used:
            raise NotSupportedNatively(f"native programs of vision towers do not support {feature}")
    [num_layers] = spec.feature_layers
    layer = LayerSpec(rope=None)
    indices = tuple((rf"^.*encoder\.layers\.{i}\.", f"layers.{i + 1}.") for i in range(num_layers))
    return ModelSpec(
        model_type="vision",
        vocab_size=spec.hidden_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_heads,
        head_dim=spec.size_of_heads,
        layers=(layer,) * (num_layers + 2),
        max_position_embeddings=spec.num_patches + 1,
        norm_eps=spec.norm_eps,
        attention_scale=spec.attention_scale or spec.size_of_heads**-0.5,
        tie_word_embeddings=True,
        activation=_ACTIVATIONS[spec.activation],
        has_gate=spec.has_gate,
        norms=NormNames(
            attention_output="attention_output_norm" if spec.has_output_norms else None,
            mlp_output="mlp_output_norm" if spec.has_output_norms else None,
        ),
        norm_kind=spec.norm_kind,
        norm_bias=spec.norm_kind == "layer",
        qk_norm=spec.qk_norm,
        qkv_bias=spec.qkv_bias,
        attention_output_bias=spec.product_bias,
        mlp_bias=spec.product_bias,
        mlp_output_bias=spec.product_bias,
        tensor_names=(*spec.tensor_names, *indices, *_NAMES),
        is_causal=False,
    )
