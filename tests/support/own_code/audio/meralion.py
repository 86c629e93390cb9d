"""MERaLiON-2: Whisper's encoder, whose normed rows are joined and gated, and Gemma 2."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from support.own_code.audio.model import AudioModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.whisper.modeling_whisper import WhisperEncoder

STACK = 5
_SECONDS = 2


class Meralion(AudioModel):
    """The model that the authors publish. Silence fills a clip up to a multiple of the windows' length."""

    published_names = (
        (r"^audio_tower\.", "speech_encoder."),
        (r"^language_model\.", "text_decoder."),
        (r"^multi_modal_projector\.ln_pre\.", "ln_speech."),
        (r"^multi_modal_projector\.linear_0\.", "speech_audio_adapter.mlp_adapter.0."),
        (r"^multi_modal_projector\.linear_1\.", "speech_audio_adapter.gate_proj."),
        (r"^multi_modal_projector\.linear_2\.", "speech_audio_adapter.pool_proj."),
        (r"^multi_modal_projector\.linear_3\.", "speech_audio_adapter.out_proj."),
    )

    def __init__(self, text: dict[str, Any], token: int, num_mel_bins: int) -> None:
        audio = transformers.WhisperConfig(
            num_mel_bins=num_mel_bins,
            max_source_positions=50 * _SECONDS,
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=48,
        )
        decoder = transformers.Gemma2Config(
            **{**text, "head_dim": 16, "attn_implementation": "eager"}
        )
        config = {
            "architectures": ["MERaLiON2ForConditionalGeneration"],
            "model_type": "meralion2",
            "speech_config": audio.to_dict(),
            "speech_mlp_scale_factor": STACK,
            "speech_token_index": token,
            "text_config": decoder.to_dict(),
        }
        super().__init__(config, token)
        self.num_mel_bins = num_mel_bins
        self.audio_tower = WhisperEncoder(audio)
        inner, size = 5 * 32, text["hidden_size"]
        self.multi_modal_projector = projector = nn.Module()
        projector.ln_pre = nn.LayerNorm(32)
        projector.linear_0 = nn.Linear(STACK * 32, inner)
        projector.linear_1 = nn.Linear(inner, inner)
        projector.linear_2 = nn.Linear(inner, inner)
        projector.linear_3 = nn.Linear(inner, size)
        self.language_model = transformers.Gemma2ForCausalLM(decoder)

    def other_files(self) -> dict[str, Any]:
        """Return the settings of the feature extractor."""
        extractor = transformers.WhisperFeatureExtractor(self.num_mel_bins, chunk_length=_SECONDS)
        return {"preprocessor_config.json": extractor.to_dict()}

    def encode(self, samples: np.ndarray) -> Tensor:
        """Return the outputs of the tower for a clip of 16 kHz."""
        extractor = transformers.WhisperFeatureExtractor(self.num_mel_bins, chunk_length=_SECONDS)
        features = extractor(
            samples,
            sampling_rate=16_000,
            padding=True,
            truncation=False,
            pad_to_multiple_of=16_000 * _SECONDS,
            return_tensors="pt",
        )["input_features"][0]
        windows = torch.stack(features.split(100 * _SECONDS, 1))
        mlp = self.multi_modal_projector
        x = mlp.ln_pre(self.audio_tower(windows).last_hidden_state)
        x = F.silu(mlp.linear_0(x.reshape(-1, STACK * 32)))
        found: Tensor = mlp.linear_3(F.silu(mlp.linear_1(x)) * mlp.linear_2(x))
        return found
