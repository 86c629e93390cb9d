"""Tiny random Gemma models that read audio clips."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from support.vision.gemma3n import TEXT, named_weight
from transformers.models.gemma3n.modeling_gemma3n import (
    Gemma3nAudioEncoder,
    Gemma3nMultimodalEmbedder,
)


class Gemma3nListener(torch.nn.Module):
    """The decoder and the audio tower of transformers' Gemma 3n, whose vision tower would need timm."""

    def __init__(self, text: Any, audio: Any) -> None:
        super().__init__()
        decoder = transformers.Gemma3nForCausalLM(text)
        self.model = torch.nn.ModuleDict(
            {
                "language_model": decoder.model,
                "audio_tower": Gemma3nAudioEncoder(audio),
                "embed_audio": Gemma3nMultimodalEmbedder(audio, text),
            }
        )
        self.config = text

    def forward(self, input_ids: torch.Tensor, input_features: Any = ()) -> Any:
        """Return the logits of a prompt with clips, each of which is computed by itself."""
        decoder, tower, embed = (
            self.model[name] for name in ("language_model", "audio_tower", "embed_audio")
        )
        embeds = decoder.embed_tokens(input_ids)
        is_audio = input_ids >= embed.vocab_offset
        last = torch.tensor([[self.config.vocab_size - 1]])
        embeds = torch.where(
            is_audio[..., None], embed(input_ids=torch.where(is_audio, input_ids, last)), embeds
        )
        outputs = []
        for features in input_features:
            mask = torch.zeros(features.shape[:1], dtype=torch.bool)[None]
            found = embed(inputs_embeds=tower(features[None], mask).last_hidden_state)[0]
            filler = embed(input_ids=last)[0].expand(NUM_OUTPUTS - len(found), -1)
            outputs.append(torch.cat((found, filler)))
        if outputs:
            is_placed = (input_ids == embed.vocab_offset)[..., None]
            embeds = embeds.masked_scatter(is_placed, torch.cat(outputs))
        hidden = decoder(
            inputs_embeds=embeds, per_layer_inputs=decoder.get_per_layer_inputs(input_ids)
        ).last_hidden_state
        logits = hidden @ decoder.embed_tokens.weight.T
        cap = self.config.final_logit_softcapping
        return SimpleNamespace(logits=torch.tanh(logits / cap) * cap)


NUM_OUTPUTS = 188
_AUDIO = {
    "hidden_size": 32,
    "conf_num_hidden_layers": 2,
    "conf_num_attention_heads": 4,
    "sscp_conv_channel_size": [6, 4],
}


def gemma3n_directory(
    directory: Path, tokenizer: Any, num_mel_bins: int, marks: list[int]
) -> tuple[Path, Any]:
    """Write a Gemma 3n without a vision tower. Return its directory and the model.

    `marks` are the tokens before, of and after a clip. The last two have embeddings of the tower.
    """
    begin, mark, end = marks
    text = transformers.Gemma3nTextConfig(
        **TEXT, vocab_size=len(tokenizer), vocab_size_per_layer_input=mark
    )
    audio = transformers.Gemma3nAudioConfig(
        **_AUDIO,
        input_feat_size=num_mel_bins,
        vocab_size=len(tokenizer) - mark,
        vocab_offset=mark,
    )
    model = Gemma3nListener(text, audio).float().eval()
    state = model.state_dict()
    for name, value in state.items():
        value.copy_(named_weight(name, tuple(value.shape)))
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text.to_dict(),
        "audio_config": audio.to_dict(),
        "vision_config": None,
        "boa_token_id": begin,
        "audio_token_id": mark,
        "eoa_token_id": end,
        "tie_word_embeddings": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(state, directory / "model.safetensors")
    tokenizer.save_pretrained(directory)
    return directory, model


IMAGE_PROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor",
    "max_soft_tokens": 70,
    "patch_size": 8,
    "pooling_kernel_size": 2,
}


def gemma4_config(text: dict[str, Any], num_mel_bins: int, **marks: int) -> Any:
    """Return the config of a Gemma 4 that also reads images. `marks` are the tokens of clips and images."""
    text = text | {"head_dim": 16, "global_head_dim": 16, "num_hidden_layers": 3}
    text |= {"model_type": "gemma4_text", "sliding_window": 24, "hidden_size_per_layer_input": 8}
    text |= {"vocab_size_per_layer_input": text["vocab_size"], "num_kv_shared_layers": 0}
    text["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    audio = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "subsampling_conv_channels": [num_mel_bins, 4],
        "output_proj_dims": 24,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 8,
        "pooling_kernel_size": 2,
        "position_embedding_size": 256,
        "standardize": True,
    }
    return transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        tie_word_embeddings=False,
        video_token_id=1,
        **marks,
    )


FRAME_SIZE = 640
"""The samples of a frame of Gemma 4's unified models."""


def gemma4_unified_config(text: dict[str, Any], num_mel_bins: int, **marks: int) -> Any:
    """Return the config of a unified Gemma 4. `marks` are the tokens of clips and images."""
    text = text | {"head_dim": 16, "global_head_dim": 16, "num_hidden_layers": 3}
    text |= {"model_type": "gemma4_unified_text", "sliding_window": 24, "num_kv_shared_layers": 0}
    text["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    vision = {"patch_size": 8, "pooling_kernel_size": 2}
    vision |= {"mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 80}
    return transformers.Gemma4UnifiedConfig(
        text_config=text,
        vision_config=vision,
        audio_config={"audio_embed_dim": FRAME_SIZE},
        tie_word_embeddings=False,
        video_token_id=1,
        **marks,
    )
