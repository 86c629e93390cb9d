"""The tensors of Mistral's own files: their names, and the heads whose rows are interleaved."""

from __future__ import annotations

import re
from typing import Final

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.field_names import text_section
from ....protocol.checkpoint.mistral_config.audio import NAMES as AUDIO_NAMES
from ....protocol.checkpoint.vision.pixtral import OWN_NAMES
from ..tensor_names import TensorNames, translate_names
from .safetensors_file import SafetensorsFile
from .tensors import StoredTensor

_LAYER: Final = r"^(model\.layers\.\d+\.)"
DECODER_NAMES: Final[TensorNames] = (
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^(layers|norm)\.", r"model.\1."),
    (r"^output\.", "lm_head."),
    (_LAYER + r"attention_norm\.", r"\1input_layernorm."),
    (_LAYER + r"ffn_norm\.", r"\1post_attention_layernorm."),
    (_LAYER + r"attention\.", r"\1self_attn."),
    (_LAYER + r"feed_forward\.", r"\1mlp."),
    (_LAYER + r"(gate|experts|shared_experts)\.", r"\1mlp.\2."),
    (_LAYER + r"(mlp\.(?:.*\.)?)w1\.", r"\1\2gate_proj."),
    (_LAYER + r"(mlp\.(?:.*\.)?)w2\.", r"\1\2down_proj."),
    (_LAYER + r"(mlp\.(?:.*\.)?)w3\.", r"\1\2up_proj."),
    (_LAYER + r"self_attn\.w([qkvo])\.", r"\1self_attn.\2_proj."),
    (_LAYER + r"self_attn\.wq_([ab])\.", r"\1self_attn.q_\2_proj."),
    (_LAYER + r"self_attn\.wkv_a_with_mqa\.", r"\1self_attn.kv_a_proj_with_mqa."),
    (_LAYER + r"self_attn\.wkv_b\.", r"\1self_attn.kv_b_proj."),
    (_LAYER + r"self_attn\.(q|kv)_a_norm\.", r"\1self_attn.\2_a_layernorm."),
)
"""The names of a decoder, which begin with those of layers. Those of transformers stay as they are."""

_FILE_NAMES: Final[TensorNames] = (
    # The scales of attention in eight bits are not used.
    (r".*_fake_quantizer\..*", ""),
    (r"\.qscale_weight$", ".weight_scale"),
    (r"\.qscale_act$", ".input_scale"),
    *DECODER_NAMES,
    *OWN_NAMES,
)
"""The names of a whole model."""

_ROTATED: Final = re.compile(
    r"(?:(vision|audio)_tower\.)?.*\.(q|k)_proj\.(weight|bias|weight_scale)"
)


class _InterleavedHeads:
    """The numbers of heads whose rows Mistral's files interleave, unlike those of transformers.

    Both halves of a head are rotated together. Transformers has one after the other, Mistral alternates their rows.
    """

    def __init__(self, config: ConfigFields) -> None:
        text, vision = text_section(config) or config, config.section("vision_config")
        self._shapes: dict[tuple[str | None, str], tuple[int, int]] = {}
        # Latent attention rotates alternating rows in both formats.
        if text.get("kv_lora_rank") is None:
            heads = text.integer("num_attention_heads")
            size = text.integer("head_dim", text.integer("hidden_size") // heads)
            self._shapes[None, "q"] = heads, size
            self._shapes[None, "k"] = text.integer("num_key_value_heads", heads), size
        if vision is not None:
            heads = vision.integer("num_attention_heads", 16)
            size = vision.integer("hidden_size", 1024) // heads
            self._shapes |= dict.fromkeys((("vision", "q"), ("vision", "k")), (heads, size))
        audio = config.section("audio_config")
        if audio is not None and audio.get("head_dim") is not None:
            shape = audio.integer("num_attention_heads"), audio.integer("head_dim")
            self._shapes |= dict.fromkeys((("audio", "q"), ("audio", "k")), shape)

    def count(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the number of interleaved heads in a tensor of this name and shape; 0 if it has none."""
        found = _ROTATED.fullmatch(name)
        if found is None or not shape:
            return 0
        count, size = self._shapes.get((found[1], found[2]), (0, 0))
        # A scale of a whole matrix, or of a block of rows, has no rows of heads.
        return count if shape[0] == count * size and size % 2 == 0 else 0


def mistral_tensors(file: SafetensorsFile, config: ConfigFields) -> dict[str, StoredTensor]:
    """Return the tensors of a file of a model with this config, by transformers' names and in its order."""
    heads = _InterleavedHeads(config)
    kind = config.text("model_type", "")
    names = translate_names(file.names, (*AUDIO_NAMES.get(kind, ()), *_FILE_NAMES))
    return {
        name: StoredTensor(file, stored, num_heads=heads.count(name, file.shape(stored)))
        for name, stored in names.items()
    }
