"""The base of models that read audio clips and have no class in transformers, and parts that several have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer


class AudioModel(nn.Module):
    """A decoder that reads the outputs of a tower in place of a token. `config` is that of the checkpoint."""

    published_names: tuple[tuple[str, str], ...] = ()
    """Replacements that translate the names of parameters to those of the checkpoint."""

    def __init__(self, config: dict[str, Any], token: int) -> None:
        super().__init__()
        self.checkpoint_config = config
        self.token = token

    @property
    def text_model(self) -> Any:
        """The decoder."""
        return self.language_model

    def other_files(self) -> dict[str, Any]:
        """Return the names and contents of the checkpoint's other files."""
        return {}

    def encode(self, samples: np.ndarray) -> Tensor:
        """Return the outputs of the tower for a clip of 16 kHz."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, clips: Any = ()) -> CausalLMOutput:
        """Return the logits of a prompt with clips."""
        embeds = self.text_model.get_input_embeddings()(input_ids).clone()
        if len(clips):
            embeds[input_ids == self.token] = torch.cat([self.encode(x) for x in clips])
        return CausalLMOutput(logits=self.text_model(inputs_embeds=embeds).logits)


def audio_model_directory(
    directory: Path, model: AudioModel, tokenizer: Any
) -> tuple[Path, AudioModel]:
    """Write a model with random weights. Return its directory and the model."""
    model = model.float().eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if "running_" in name:
                buffer.uniform_(0.5, 1.5)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.checkpoint_config))
    tensors = {}
    for name, x in model.state_dict().items():
        for pattern, replacement in model.published_names:
            name = re.sub(pattern, replacement, name)
        tensors[name] = x.contiguous().clone()
    save_file(tensors, directory / "model.safetensors")
    tokenizer.save_pretrained(directory)
    for name, content in model.other_files().items():
        (directory / name).write_text(json.dumps(content))
    return directory, model


def whisper_features(samples: np.ndarray, size: int) -> Tensor:
    """Return the features [size, frames] of a clip before silence."""
    extract = transformers.WhisperFeatureExtractor(feature_size=size, chunk_length=10)
    options = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
    found = extract(samples, sampling_rate=16_000, **options)
    return found["input_features"][0][:, : int(found["attention_mask"].sum())]


def whisper_layers(size: int, inner: int) -> nn.ModuleList:
    sizes = {"d_model": size, "encoder_attention_heads": 4, "encoder_ffn_dim": inner}
    config = transformers.WhisperConfig(**sizes, attn_implementation="eager")
    return nn.ModuleList(WhisperEncoderLayer(config) for _ in range(2))


def apply_layers(layers: nn.ModuleList, x_PD: Tensor) -> Tensor:
    for layer in layers:
        found = layer(x_PD[None], None)
        x_PD = (found[0] if isinstance(found, tuple) else found).reshape(x_PD.shape)
    return x_PD
