"""Fun-ASR-Nano in its authors' layout, made of the parts of transformers'."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
import transformers
from support.media.audio_features import stacked_features
from support.own_code.audio.model import AudioModel
from torch import Tensor

_FIRST, _LAST, _MEL_BINS = 2, 1, 80
_NAMES = (
    (r"^inner\.model\.language_model\.", "llm.model."),
    (r"^inner\.lm_head\.", "llm.lm_head."),
    (r"^inner\.model\.multi_modal_projector\.linear_", "audio_adaptor.linear"),
    (r"^inner\.model\.multi_modal_projector\.layers\.", "audio_adaptor.blocks."),
    (r"^inner\.model\.audio_tower\.layers\.2\.final_layernorm\.", "audio_encoder.tp_norm."),
    (r"^inner\.model\.audio_tower\.layers\.1\.final_layernorm\.", "audio_encoder.after_norm."),
    (r"^inner\.model\.audio_tower\.layers\.0\.", "audio_encoder.encoders0.0."),
    (r"^inner\.model\.audio_tower\.layers\.1\.", "audio_encoder.encoders.0."),
    (r"^inner\.model\.audio_tower\.layers\.2\.", "audio_encoder.tp_encoders.0."),
    (r"^(audio.*)\.self_attn\.([qkv])_proj\.", r"\1.self_attn.linear_\2."),
    (r"^(audio.*)\.self_attn\.o_proj\.", r"\1.self_attn.linear_out."),
    (r"^(audio.*)\.fsmn\.conv\.", r"\1.fsmn_block."),
    (r"^(audio.*)\.mlp\.fc(\d)\.", r"\1.feed_forward.w_\2."),
    (r"^(audio.*)\.input_layernorm\.", r"\1.norm1."),
    (r"^(audio.*)\.post_attention_layernorm\.", r"\1.norm2."),
)


class FunAsr(AudioModel):
    """A Fun-ASR-Nano whose decoder reads the first eighth of the encoder's rows."""

    def __init__(self, text: dict[str, Any], token: int) -> None:
        size = text["hidden_size"]
        decoder = transformers.Qwen3Config(**text, head_dim=16)
        conf = {"output_size": 32, "attention_heads": 4, "linear_units": 48, "kernel_size": 4}
        conf |= {"num_blocks": _FIRST, "tp_blocks": _LAST, "normalize_before": True}
        names = {"architectures": ["FunASRForConditionalGeneration"], "audio_encoder_conf": conf}
        super().__init__(decoder.to_dict() | names, token)
        self.inner = transformers.FunAsrNanoForConditionalGeneration(
            transformers.FunAsrNanoConfig(
                audio_config={
                    "hidden_size": 32,
                    "num_attention_heads": 4,
                    "intermediate_size": 48,
                    "num_hidden_layers": _FIRST + _LAST,
                    "num_timestamp_prediction_layers": _LAST,
                    "fsmn_kernel_size": 4,
                    "layer_norm_eps": 1e-12,
                },
                adaptor_config={
                    "hidden_size": size,
                    "intermediate_size": size // 4,
                    "layer_norm_eps": 1e-12,
                },
                text_config=decoder.to_dict(),
                audio_token_id=token,
            )
        )

    def forward(self, input_ids: Tensor, clips: Any = ()) -> Any:
        """Return the logits of a prompt with clips."""
        embeds = self.inner.get_input_embeddings()(input_ids).clone()
        if len(clips):
            embeds[input_ids == self.token] = torch.cat([self.encode(x) for x in clips])
        return self.inner(inputs_embeds=embeds)

    def encode(self, samples: np.ndarray) -> Tensor:
        """Return the outputs of the tower for a clip of 16 kHz."""
        rows = stacked_features(samples, _MEL_BINS)[None]
        mask = torch.ones(rows.shape[:2])
        found = self.inner.model.get_audio_features(rows, mask).pooler_output.flatten(0, -2)
        return found[: -(-len(found) // 8)]

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the tensors of the checkpoint by their names. The encoder's have queries, keys and values together."""
        tensors = {}
        for name, x in super().state_dict(*args, **options).items():
            for pattern, replacement in _NAMES:
                name = re.sub(pattern, replacement, name)
            tensors[name] = x
        joined = "audio_encoder.", ".self_attn.linear_q."
        for name in [x for x in tensors if x.startswith(joined[0]) and joined[1] in x]:
            parts = [tensors.pop(name.replace("linear_q", f"linear_{each}")) for each in "qkv"]
            tensors[name.replace("linear_q", "linear_q_k_v")] = torch.cat(parts)
        return tensors
