"""FireRedASR2, a model that transcribes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from support.media.audio_features import kaldi_features
from support.own_code.audio.model import AudioModel
from torch import Tensor, nn
from torch.nn import functional as F


class FireRed(AudioModel):
    """FireRedASR2: a conformer whose queries, keys and values have their own norms."""

    def __init__(self, text: dict[str, Any], token: int, num_mel_bins: int) -> None:
        size, layers, inner = text["hidden_size"], 2, 32
        encoder = {"idim": num_mel_bins, "n_layers_enc": layers, "n_head": 4, "d_model": inner}
        decoder = transformers.Qwen2Config(**text)
        names = {"architectures": ["FireRedASR2ForConditionalGeneration"], "model_type": "qwen2"}
        conf = {"audio_encoder_conf": encoder | {"kernel_size": 5}, "encoder_downsample_rate": 2}
        super().__init__(decoder.to_dict() | names | conf, token)
        self.num_mel_bins = num_mel_bins
        random = np.random.default_rng(3)
        self.means, self.factors = (
            random.uniform(4, 8, num_mel_bins),
            random.uniform(0.2, 0.4, num_mel_bins),
        )
        self.encoder = nn.Module()
        self.encoder.input_preprocessor = stem = nn.Module()
        stem.conv = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 32, 3, 2), nn.ReLU()
        )
        stem.out = nn.Linear(32 * (((num_mel_bins - 1) // 2 - 1) // 2), inner)
        self.encoder.layer_stack = nn.ModuleList(_ConformerBlock(inner, 5) for _ in range(layers))
        self.encoder_projector = nn.Module()
        self.encoder_projector.linear1 = nn.Linear(2 * inner, size)
        self.encoder_projector.linear2 = nn.Linear(size, size)
        self.llm = transformers.Qwen2ForCausalLM(decoder)

    @property
    def text_model(self) -> Any:
        """The decoder."""
        return self.llm

    def other_files(self) -> dict[str, Any]:
        """Return the names and contents of the checkpoint's other files."""
        found = {"means": self.means.tolist(), "inverse_std_variences": self.factors.tolist()}
        return {"preprocessor_config.json": found | {"num_mel_bins": self.num_mel_bins}}

    def encode(self, samples: np.ndarray) -> Tensor:
        """Return the outputs of the tower for a clip of 16 kHz."""
        x = kaldi_features(samples, self.num_mel_bins).double()
        x = ((x - torch.from_numpy(self.means)) * torch.from_numpy(self.factors)).float()
        stem = self.encoder.input_preprocessor
        x = stem.conv(F.pad(x, (0, 0, 0, 6))[None, None])
        x = stem.out(x.transpose(1, 2).flatten(2))
        for block in self.encoder.layer_stack:
            x = block(x)
        x = x[0, : x.shape[1] // 2 * 2].reshape(-1, 2 * x.shape[2])
        projector = self.encoder_projector
        return projector.linear2(F.relu(projector.linear1(x)))


class _ConformerBlock(nn.Module):
    def __init__(self, size: int, kernel: int) -> None:
        super().__init__()

        def mlp() -> nn.Module:
            found = nn.Module()
            found.net = nn.Sequential(
                nn.LayerNorm(size),
                nn.Linear(size, 4 * size),
                nn.SiLU(),
                nn.Identity(),
                nn.Linear(4 * size, size),
            )
            return found

        self.ffn1, self.ffn2 = mlp(), mlp()
        self.mhsa = attention = nn.Module()
        for name in ("w_qs", "w_ks", "w_vs", "fc", "linear_pos"):
            setattr(attention, name, nn.Linear(size, size, bias=False))
        for name in "qkv":
            setattr(attention, f"layer_norm_{name}", nn.LayerNorm(size))
        for name in "uv":
            setattr(attention, f"pos_bias_{name}", nn.Parameter(torch.empty(4, size // 4)))
        self.conv = convolution = nn.Module()
        convolution.pre_layer_norm = nn.LayerNorm(size)
        convolution.pointwise_conv1 = nn.Conv1d(size, 4 * size, 1, bias=False)
        convolution.depthwise_conv = nn.Conv1d(
            2 * size, 2 * size, kernel, padding=kernel // 2, groups=2 * size, bias=False
        )
        convolution.batch_norm = nn.LayerNorm(2 * size)
        convolution.pointwise_conv2 = nn.Conv1d(2 * size, size, 1, bias=False)
        self.layer_norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ffn1.net(x)
        x = x + self._attend(x)
        found = self.conv
        y = F.glu(found.pointwise_conv1(found.pre_layer_norm(x).transpose(1, 2)), 1)
        y = F.silu(found.batch_norm(found.depthwise_conv(y).transpose(1, 2)))
        x = x + found.pointwise_conv2(y.transpose(1, 2)).transpose(1, 2)
        return self.layer_norm(x + 0.5 * self.ffn2.net(x))

    def _attend(self, x: Tensor) -> Tensor:
        found, length, size = self.mhsa, x.shape[1], x.shape[2]
        q, k, v = (
            getattr(found, f"w_{name}s")(getattr(found, f"layer_norm_{name}")(x)[0]).view(
                length, 4, -1
            )
            for name in "qkv"
        )
        scores = torch.einsum("ihd,jhd->hij", q + found.pos_bias_u, k)
        frequencies = 10_000 ** (-torch.arange(0, size, 2) / size)
        for i in range(length):
            angles = (i - torch.arange(length)[:, None]) * frequencies
            near = found.linear_pos(torch.stack((angles.sin(), angles.cos()), 2).flatten(1))
            near = near.view(length, 4, -1)
            scores[:, i] += torch.einsum("hd,jhd->hj", q[i] + found.pos_bias_v, near)
        weights = (scores / (size // 4) ** 0.5).softmax(2)
        return found.fc(torch.einsum("hij,jhd->ihd", weights, v).reshape(1, length, size))
