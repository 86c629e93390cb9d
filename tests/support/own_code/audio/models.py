"""Models that read audio clips and have no class in transformers, as their authors publish them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import transformers
from support.own_code.audio.fireredasr import FireRed
from support.own_code.audio.funasr import FunAsr
from support.own_code.audio.meralion import Meralion
from support.own_code.audio.model import AudioModel, apply_layers, whisper_features, whisper_layers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.audio_utils import mel_filter_bank
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.whisper.modeling_whisper import sinusoids


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
        tower.layers = whisper_layers(32, 48)
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
        for chunk in whisper_features(samples, self.num_mel_bins).split(200, 1):
            x = F.gelu(tower.conv2(F.gelu(tower.conv1(chunk[None]))))[0].T
            chunks.append(apply_layers(tower.layers, x + sinusoids(100, 32)[: len(x)]))
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
                "encoder": audio,
                "lfm": decoder.to_dict(),
                "adapter_hidden_dims": [40],
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


class MossAudio(AudioModel):
    """MOSS-Audio: chunks of 200 frames, whose hidden states the decoder also adds after its first layers."""

    published_names = (
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "language_model."),
    )

    def __init__(self, text: dict[str, Any], token: int, num_mel_bins: int) -> None:
        size = text["hidden_size"]
        audio = {
            "num_mel_bins": num_mel_bins,
            "d_model": 32,
            "output_dim": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "downsample_hidden_size": 6,
            "n_window": 100,
            "deepstack_encoder_layer_indexes": [0, 1],
        }
        decoder = transformers.Qwen3Config(**text, head_dim=16)
        super().__init__(
            {
                "architectures": ["MossAudioModel"],
                "model_type": "moss_audio",
                "audio_config": audio,
                "language_config": decoder.to_dict(),
                "adapter_hidden_size": 40,
            },
            token,
        )
        self.num_mel_bins = num_mel_bins
        self.lock = threading.Lock()
        self.audio_encoder = encoder = nn.Module()
        for number, columns in ((1, 1), (2, 6), (3, 6)):
            setattr(encoder, f"conv{number}", nn.Conv2d(columns, 6, 3, 2, 1))
        encoder.stem_proj = nn.Linear(6 * -(-num_mel_bins // 8), 32)
        encoder.layers = whisper_layers(32, 48)
        encoder.layer_norm = nn.LayerNorm(32)

        def gated() -> nn.Module:
            found = nn.Module()
            found.gate_proj, found.up_proj = (nn.Linear(32, 40, bias=False) for _ in range(2))
            found.down_proj = nn.Linear(40, size, bias=False)
            return found

        self.audio_adapter = gated()
        self.deepstack_audio_merger_list = nn.ModuleList(gated() for _ in range(2))
        self.language_model = transformers.Qwen3ForCausalLM(decoder)

    def other_files(self) -> dict[str, Any]:
        """Return the names and contents of the checkpoint's other files."""
        # The tokenizer has no tokens for the begin and the end of a clip.
        found = {"audio_token_id": self.token, "audio_start_id": 5, "audio_end_id": 6}
        return {"processor_config.json": found | {"enable_time_marker": True}}

    def encode_all(self, samples: np.ndarray) -> list[Tensor]:
        """Return the outputs for the embeddings and for the first two layers."""
        encoder = self.audio_encoder
        extract = transformers.WhisperFeatureExtractor(feature_size=self.num_mel_bins)
        options = {"padding": False, "truncation": False, "return_tensors": "pt"}
        features = extract(samples, sampling_rate=16_000, **options)["input_features"][0]
        features = features[:, : len(samples) // 160]
        chunks = features.split(200, 1)
        found: list[list[Tensor]] = [[], [], []]
        for chunk in chunks:
            length = chunk.shape[1]
            x = F.pad(chunk, (0, chunks[0].shape[1] - length))[None, None]
            for number in (1, 2, 3):
                x = F.gelu(getattr(encoder, f"conv{number}")(x))
            x = encoder.stem_proj(x.permute(0, 3, 1, 2).flatten(2))[0][: -(-length // 8)]
            x = x + sinusoids(25, 32)[: len(x)]
            for index, layer in enumerate(encoder.layers):
                x = apply_layers(nn.ModuleList([layer]), x)
                found[1 + index].append(x)
            found[0].append(encoder.layer_norm(x))
        mlps = (self.audio_adapter, *self.deepstack_audio_merger_list)
        return [
            mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
            for mlp, x in zip(mlps, map(torch.cat, found), strict=True)
        ]

    def forward(self, input_ids: Tensor, clips: Any = ()) -> CausalLMOutput:
        """Return the logits of a prompt with clips."""
        # Threads of a test share the hooks.
        with self.lock:
            return self._forward(input_ids, clips)

    def _forward(self, input_ids: Tensor, clips: Any) -> CausalLMOutput:
        model = self.language_model
        embeds = model.get_input_embeddings()(input_ids).clone()
        is_audio = input_ids == self.token
        hooks = []
        if len(clips):
            parts = [torch.cat(x) for x in zip(*map(self.encode_all, clips), strict=True)]
            embeds[is_audio] = parts[0]

            def adding(part: Tensor) -> Any:
                def add(_: Any, __: Any, output: Any) -> Any:
                    states = output[0] if isinstance(output, tuple) else output
                    states = states.clone()
                    states[is_audio] += part
                    return (states, *output[1:]) if isinstance(output, tuple) else states

                return add

            hooks = [
                layer.register_forward_hook(adding(part))
                for layer, part in zip(model.model.layers, parts[1:], strict=False)
            ]
        try:
            return CausalLMOutput(logits=model(inputs_embeds=embeds).logits)
        finally:
            for hook in hooks:
                hook.remove()


OWN_CODE = (
    *("fireredasr2", "funasr", "funaudiochat", "lfm2_audio"),
    *("meralion2", "midashenglm", "moss_audio"),
)
"""The beginnings of the kinds of these models."""


def own_model(kind: str, text: dict[str, Any], token: int, num_mel_bins: int) -> AudioModel:
    """Return the model of a kind, whose `token` stands for the outputs of its tower."""
    name, _, variant = kind.partition(" ")
    if name == "fireredasr2":
        return FireRed(text, token, num_mel_bins)
    if name == "funasr":
        return FunAsr(text, token)
    if name == "moss_audio":
        return MossAudio(text, token, num_mel_bins)
    if name == "meralion2":
        return Meralion(text, token, num_mel_bins)
    if name == "lfm2_audio":
        return Lfm2Audio(text, token, num_mel_bins)
    if name == "midashenglm":
        return MiDasheng(text, token, num_mel_bins)
    return FunAudioChat(text, token, num_mel_bins, variant)
