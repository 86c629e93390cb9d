"""Models that read audio clips and have no class in transformers, as their authors publish them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from support.audio_features import kaldi_features
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.audio_utils import mel_filter_bank
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer, sinusoids


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
    if isinstance(model, FireRed):
        names = ("means", "inverse_std_variences")
        found = dict(zip(names, (model.means.tolist(), model.factors.tolist()), strict=True))
        found["num_mel_bins"] = model.num_mel_bins
        (directory / "preprocessor_config.json").write_text(json.dumps(found))
    return directory, model


def _whisper_features(samples: np.ndarray, size: int) -> Tensor:
    """Return the features [size, frames] of a clip before silence."""
    extract = transformers.WhisperFeatureExtractor(feature_size=size, chunk_length=10)
    options = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
    found = extract(samples, sampling_rate=16_000, **options)
    return found["input_features"][0][:, : int(found["attention_mask"].sum())]


def _whisper_layers(size: int, inner: int) -> nn.ModuleList:
    sizes = {"d_model": size, "encoder_attention_heads": 4, "encoder_ffn_dim": inner}
    config = transformers.WhisperConfig(**sizes, attn_implementation="eager")
    return nn.ModuleList(WhisperEncoderLayer(config) for _ in range(2))


def _apply(layers: nn.ModuleList, x_PD: Tensor) -> Tensor:
    for layer in layers:
        found = layer(x_PD[None], None)
        x_PD = (found[0] if isinstance(found, tuple) else found).reshape(x_PD.shape)
    return x_PD


class FunAudioChat(AudioModel):
    """Fun-Audio-Chat: chunks of two seconds in Whisper's layers, whose pooled outputs are joined in groups of five."""

    def __init__(self, text: dict[str, Any], token: int, num_mel_bins: int, mode: str) -> None:
        size = text["hidden_size"]
        audio = {
            "num_mel_bins": num_mel_bins,
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "n_window": 100,
            "output_dim": size,
            "group_size": 5,
            "codebook_size": 11,
            "pad_token_id": 7,
            "continuous_features_mode": mode,
        }
        decoder = transformers.Qwen3Config(**text, head_dim=16)
        super().__init__(
            {
                "architectures": ["FunAudioChatForConditionalGeneration"],
                "model_type": "funaudiochat",
                "audio_config": audio,
                "text_config": decoder.to_dict(),
                "audio_token_index": token,
            },
            token,
        )
        self.mode, self.size, self.num_mel_bins = mode, size, num_mel_bins
        self.continuous_audio_tower = tower = nn.Module()
        tower.conv1 = nn.Conv1d(num_mel_bins, 32, 3, padding=1)
        tower.conv2 = nn.Conv1d(32, 32, 3, stride=2, padding=1)
        tower.layers = _whisper_layers(32, 48)
        tower.ln_post = nn.LayerNorm(32)
        tower.proj = nn.Linear(32, size)
        self.audio_tower = codes = nn.Module()
        codes.embed_tokens = nn.Embedding(11, size)
        codes.output_matching = nn.Linear(size, size, bias=False)
        codes.continual_output_matching = nn.Linear(size, size, bias=False)
        self.language_model = transformers.Qwen3ForCausalLM(decoder)

    def encode(self, samples: np.ndarray) -> Tensor:
        """Return the outputs of the tower for a clip of 16 kHz."""
        tower, codes = self.continuous_audio_tower, self.audio_tower
        chunks = []
        for chunk in _whisper_features(samples, self.num_mel_bins).split(200, 1):
            x = F.gelu(tower.conv2(F.gelu(tower.conv1(chunk[None]))))[0].T
            chunks.append(_apply(tower.layers, x + sinusoids(100, 32)[: len(x)]))
        pooled = F.avg_pool1d(torch.cat(chunks).T[None], 2)[0].T
        num_tokens = max(1, len(samples) // 640)
        # The tokens of a clip, which are padding, are filled up to a multiple of five.
        length = -(-num_tokens // 5) * 5
        x = tower.proj(tower.ln_post(pooled))[:length]
        x = F.pad(x, (0, 0, 0, length - len(x))).view(-1, 5, self.size).mean(1)
        x = codes.continual_output_matching(x)
        if self.mode == "replace":
            return x
        tokens = codes.embed_tokens(torch.full((len(x), 5), 7)).mean(1)
        return codes.output_matching(tokens) + x


class MiDasheng(AudioModel):
    """MiDashengLM: transformer layers over patches of four frames, five of which are projected to an output."""

    def __init__(self, text: dict[str, Any], token: int, num_mel_bins: int) -> None:
        size, layers = text["hidden_size"], 2
        audio = {
            "embed_dim": 32,
            "depth": layers,
            "num_heads": 4,
            "mlp_ratio": 1.5,
            "init_values": 0.1,
            "n_mels": num_mel_bins,
            "patch_size": [num_mel_bins, 4],
            "patch_stride": [num_mel_bins, 4],
            "target_length": 204,
        }
        decoder = transformers.Qwen2Config(**text)
        nested = decoder.to_dict() | {"model_type": "qwen2_5_omni_text"}
        config = {"architectures": ["MiDashengLMModel"], "model_type": "midashenglm"}
        super().__init__(config | {"audio_encoder_config": audio, "text_config": nested}, token)
        self.num_mel_bins = num_mel_bins
        self.audio_encoder = encoder = nn.Module()
        encoder.init_bn = nn.BatchNorm2d(num_mel_bins)
        encoder.patch_embed = nn.Module()
        encoder.patch_embed.proj = nn.Conv2d(1, 32, (num_mel_bins, 4), (num_mel_bins, 4))
        encoder.time_pos_embed = nn.Parameter(torch.empty(1, 32, 1, 51))
        encoder.freq_pos_embed = nn.Parameter(torch.empty(1, 32, 1, 1))
        encoder.blocks = nn.ModuleList(_Block(32, 48) for _ in range(layers))
        encoder.norm = nn.LayerNorm(32, 1e-6)
        self.audio_projector = nn.Module()
        self.audio_projector.net = nn.Sequential(
            nn.Linear(5 * 32, size), nn.GELU(), nn.Linear(size, size)
        )
        self.decoder = transformers.Qwen2ForCausalLM(decoder)

    @property
    def text_model(self) -> Any:
        """The decoder."""
        return self.decoder

    def encode(self, samples: np.ndarray) -> Tensor:
        """Return the outputs of the tower for a clip of 16 kHz."""
        encoder = self.audio_encoder
        filters = mel_filter_bank(257, self.num_mel_bins, 0, 8000, 16_000, None, "htk")
        wave = torch.from_numpy(samples)
        spectrum = torch.stft(wave, 512, 160, window=torch.hann_window(512), return_complex=True)
        power = torch.from_numpy(filters).float().T @ spectrum.abs() ** 2
        decibels = 10 * power.clamp(min=1e-10).log10()
        x = torch.maximum(decibels, decibels.max() - 120)
        x = encoder.init_bn(x[None, :, None]).transpose(1, 2)
        x = encoder.patch_embed.proj(x)
        is_seen = torch.arange(x.shape[-1]) < len(samples) // 640
        parts = []
        for part, mask in zip(x.split(51, -1), is_seen.split(51), strict=True):
            part = part + encoder.time_pos_embed[..., : part.shape[-1]] + encoder.freq_pos_embed
            rows = part.flatten(2).transpose(1, 2)
            for block in encoder.blocks:
                rows = block(rows, mask)
            parts.append(encoder.norm(rows))
        rows = torch.cat(parts, 1)[0]
        rows = rows[: len(rows) // 5 * 5].reshape(-1, 5 * 32)
        return self.audio_projector.net(rows)


class _Block(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(size, 1e-6) for _ in range(2))
        self.attn = nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.ls1, self.ls2 = nn.Module(), nn.Module()
        self.ls1.gamma, self.ls2.gamma = (nn.Parameter(torch.empty(size)) for _ in range(2))
        self.mlp = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(size, inner), nn.Linear(inner, size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.attn.qkv(self.norm1(x)).view(1, x.shape[1], 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None, None])
        attended = self.attn.proj(attended.transpose(1, 2).flatten(2))
        x = x + self.ls1.gamma * attended
        return x + self.ls2.gamma * self.mlp.fc2(F.gelu(self.mlp.fc1(self.norm2(x))))


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


class Lfm2Audio(AudioModel):
    """LFM2-Audio without the parts that speak: NeMo's Fast Conformer and an adapter."""

    published_names = (
        (r"^conformer\.subsampling\.layers\.", "conformer.pre_encode.conv."),
        (r"^conformer\.subsampling\.linear\.", "conformer.pre_encode.out."),
        (r"\.self_attn\.([qkv])_proj\.", r".self_attn.linear_\1."),
        (r"^(conformer.*\.self_attn\.)o_proj\.", r"\1linear_out."),
        (r"\.self_attn\.relative_k_proj\.", ".self_attn.linear_pos."),
        (r"\.self_attn\.bias_", ".self_attn.pos_bias_"),
        (r"\.conv\.norm\.", ".conv.batch_norm."),
        (r"^lfm(.*\.self_attn\.)linear_([qkv])\.", r"lfm\1\2_proj."),
    )

    def __init__(self, text: dict[str, Any], token: int, num_mel_bins: int) -> None:
        size = text["hidden_size"]
        audio = {
            "feat_in": num_mel_bins,
            "d_model": 32,
            "ff_expansion_factor": 2,
            "n_layers": 2,
            "n_heads": 4,
            "conv_kernel_size": 5,
            "subsampling_conv_channels": 8,
            "xscaling": False,
        }
        layers = ["conv", "full_attention", "conv"]
        decoder = transformers.Lfm2Config(
            **text | {"num_hidden_layers": 3, "block_auto_adjust_ff_dim": False},
            layer_types=layers,
        )
        super().__init__(
            {
                "architectures": ["Lfm2AudioForConditionalGeneration"],
                "model_type": "lfm2_audio",
                "encoder": audio,
                "lfm": decoder.to_dict(),
                "adapter_hidden_size": 40,
            },
            token,
        )
        config = transformers.ParakeetEncoderConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            conv_kernel_size=5,
            subsampling_conv_channels=8,
            num_mel_bins=num_mel_bins,
            scale_input=False,
        )
        self.num_mel_bins = num_mel_bins
        self.conformer = transformers.ParakeetEncoder(config)
        self.audio_adapter = nn.Module()
        self.audio_adapter.model = nn.Sequential(
            nn.LayerNorm(32), nn.Linear(32, 40), nn.GELU(), nn.Linear(40, size)
        )
        self.lfm = transformers.Lfm2ForCausalLM(decoder)

    @property
    def text_model(self) -> Any:
        """The decoder."""
        return self.lfm

    def encode(self, samples: np.ndarray) -> Tensor:
        """Return the outputs of the tower for a clip of 16 kHz."""
        extract = transformers.ParakeetFeatureExtractor(self.num_mel_bins)
        found = extract(samples, sampling_rate=16_000, return_tensors="pt")
        features = found["input_features"][:, : int(found["attention_mask"].sum())]
        return self.audio_adapter.model(self.conformer(features).last_hidden_state[0])


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


OWN_CODE = ("fireredasr2", "funaudiochat", "lfm2_audio", "midashenglm")
"""The beginnings of the kinds of these models."""


def own_model(kind: str, text: dict[str, Any], token: int, num_mel_bins: int) -> AudioModel:
    """Return the model of a kind, whose `token` stands for the outputs of its tower."""
    name, _, variant = kind.partition(" ")
    if name == "fireredasr2":
        return FireRed(text, token, num_mel_bins)
    if name == "lfm2_audio":
        return Lfm2Audio(text, token, num_mel_bins)
    if name == "midashenglm":
        return MiDasheng(text, token, num_mel_bins)
    return FunAudioChat(text, token, num_mel_bins, variant)
