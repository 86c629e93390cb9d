"""Ultravox: Whisper's encoder, a gated projection and any decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.whisper.modeling_whisper import WhisperEncoder

STACK = 8
PLACEHOLDER = "<|reserved_special_token_0|>"


class _Projector(nn.Module):
    def __init__(self, columns: int, size: int, rows: int, *, is_last: bool) -> None:
        super().__init__()
        self.ln_pre = nn.RMSNorm(columns, 1e-6)
        self.linear_1 = nn.Linear(columns, size, bias=False)
        self.linear_2 = nn.Linear(size // 2, rows, bias=False)
        self.ln_mid = None if is_last else nn.RMSNorm(size // 2, 1e-6)
        self.ln_post = nn.RMSNorm(rows, 1e-6) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.linear_1(self.ln_pre(x)).chunk(2, -1)
        x = F.silu(gate) * x
        if self.ln_mid is not None:
            x = self.ln_mid(x)
        x = self.linear_2(x)
        return x if self.ln_post is None else self.ln_post(x)


class Ultravox(nn.Module):
    """The model that the authors publish, without audio that is streamed."""

    def __init__(self, audio: Any, text: Any, size: int, *, is_last: bool) -> None:
        super().__init__()
        self.audio_tower = WhisperEncoder(audio)
        columns = STACK * audio.d_model
        self.multi_modal_projector = _Projector(columns, size, text.hidden_size, is_last=is_last)
        self.language_model = transformers.LlamaForCausalLM(text)
        self.token = 0

    def encode(self, features_CN: Tensor) -> Tensor:
        """Return the embeddings for the log-mel features of a window."""
        tower = self.audio_tower
        x = F.gelu(tower.conv2(F.gelu(tower.conv1(features_CN[None]))))[0].T
        x = x + tower.embed_positions.weight[: len(x)]
        for layer in tower.layers:
            found = layer(x[None], None)
            x = (found[0] if isinstance(found, tuple) else found).reshape(x.shape)
        x = F.pad(tower.layer_norm(x), (0, 0, 0, -len(x) % STACK))
        found = self.multi_modal_projector(x.reshape(-1, STACK * x.shape[1]))
        return found

    def forward(self, input_ids: Tensor, windows: Any = ()) -> CausalLMOutput:
        """Return the logits of a prompt with clips, of which `windows` has the features."""
        embeds = self.language_model.get_input_embeddings()(input_ids).clone()
        if len(windows):
            embeds[input_ids == self.token] = torch.cat([self.encode(x) for x in windows])
        return CausalLMOutput(logits=self.language_model(inputs_embeds=embeds).logits)


def ultravox_directory(
    directory: Path, tokenizer: Any, text: dict[str, Any], tower: dict[str, Any], *, is_last: bool
) -> tuple[Path, Ultravox]:
    """Write an Ultravox. Return its directory and the model.

    `is_last` puts the norm of the projection after its second matrix, as in versions before 0.5.
    """
    audio = transformers.WhisperConfig(
        **tower,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
    )
    decoder = transformers.LlamaConfig(**text)
    model = Ultravox(audio, decoder, 80, is_last=is_last).float().eval()
    model.token = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    config = {
        "architectures": ["UltravoxModel"],
        "model_type": "ultravox",
        "audio_config": audio.to_dict(),
        "text_config": decoder.to_dict(),
        # The authors' configs have the id of a word here.
        "audio_token_index": 5,
        "hidden_size": 80,
        "stack_factor": STACK,
        "projector_act": "swiglu",
        "projector_ln_mid": not is_last,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: x.contiguous().clone() for name, x in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")
    tokenizer.save_pretrained(directory)
    return directory, model
