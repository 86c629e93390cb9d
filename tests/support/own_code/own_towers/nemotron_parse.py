"""Nemotron Parse: a C-RADIO that reads a page, and an mBART's decoder without positions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.own_code.model import fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIZE, _HEADS, _TABLE, _SPATIAL = 4, 32, 4, 12, 48
PAGE = (40, 36)
"""The height and the width of a page, whose last column of patches is not used."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_SIZE, 1e-6), nn.LayerNorm(_SIZE, 1e-6)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(_SIZE, 3 * _SIZE), nn.Linear(_SIZE, _SIZE)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(_SIZE, 4 * _SIZE), nn.Linear(4 * _SIZE, _SIZE)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attn.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (_HEADS, -1)).transpose(0, 1) for each in parts)
        x = x + self.attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
        found: Tensor = x + self.mlp.fc2(F.gelu(self.mlp.fc1(self.norm2(x))))
        return found


class _Encoder(nn.Module):
    """The tower with three class tokens, the first and the last of which describe the page, and a register."""

    def __init__(self, output: int) -> None:
        super().__init__()
        self.model_encoder = nn.Module()
        self.model_encoder.radio_model = radio = nn.Module()
        radio.model = nn.Module()
        radio.model.patch_generator = patches = nn.Module()
        patches.embedder = nn.Linear(3 * _PATCH**2, _SIZE, bias=False)
        patches.pos_embed = nn.Parameter(torch.zeros(1, _TABLE**2, _SIZE))
        patches.cls_token = nn.Module()
        patches.cls_token.token = nn.Parameter(torch.zeros(4, _SIZE))
        radio.model.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.conv1 = nn.Conv1d(_SIZE, output, 1)
        self.layer_norm1 = nn.LayerNorm(output, 1e-6)
        self.conv2 = nn.Conv2d(output, output, (1, 4), (1, 4), bias=False)
        self.layer_norm2 = nn.LayerNorm(output, 1e-6)
        self.sum_proj = nn.Linear(2 * _SIZE, output)
        self.layer_norm3 = nn.LayerNorm(output, 1e-6)

    def forward(self, payload: ImagePayload) -> Tensor:
        """Return what the decoder reads of a page."""
        radio: Any = self.model_encoder.radio_model
        patches = radio.model.patch_generator
        pixels = normalized(payload)
        rows, columns = (length // _PATCH for length in pixels.shape[1:])
        cells = pixels.unflatten(1, (-1, _PATCH)).unflatten(3, (-1, _PATCH))
        x = patches.embedder(cells.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1))
        table = patches.pos_embed.view(1, _TABLE, _TABLE, _SIZE).permute(0, 3, 1, 2)
        resized = F.interpolate(table, (max(rows, columns),) * 2, mode="bilinear")
        x = x + resized[0, :, :rows, :columns].flatten(1).T
        x = torch.cat((patches.cls_token.token, x))
        for block in radio.model.blocks:
            x = block(x)
        summary, features = x[[0, 2]].flatten(), x[4:]
        y = self.layer_norm1(self.conv1(features.T[None])[0].T)
        y = self.conv2(y.T.unflatten(1, (rows, columns))[None])[0].flatten(1).T
        last = self.layer_norm3(self.sum_proj(summary))[None]
        return torch.cat((self.layer_norm2(y), last))


class NemotronParse:
    """The tower and the decoder."""

    def __init__(self, encoder: _Encoder, decoder: Any, image_token: int) -> None:
        self.encoder, self.decoder, self.image_token = encoder, decoder, image_token

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits of a prompt, which reads the page of `images`, if there is one."""
        states = [self.encoder(payload)[None] for [payload] in images] or [None]
        found: Tensor = self.decoder(
            torch.tensor([tokens]), encoder_hidden_states=states[0], use_cache=False
        ).logits[0]
        return found


def nemotron_parse(directory: Path, *, vocab_size: int = 96, image_token: int = 2) -> NemotronParse:
    """Write a Nemotron Parse, whose prompts begin with `image_token`."""
    config = transformers.MBartConfig(
        vocab_size=vocab_size,
        d_model=_SPATIAL,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=80,
        max_position_embeddings=512,
        scale_embedding=True,
        is_decoder=True,
        add_cross_attention=True,
        tie_word_embeddings=False,
        pad_token_id=1,
        eos_token_id=image_token,
    )
    decoder, encoder = transformers.MBartForCausalLM(config), _Encoder(_SPATIAL)
    fill(encoder, decoder)
    with torch.no_grad():
        # The model has none.
        decoder.model.decoder.embed_positions.weight.zero_()
    teachers = [{"name": "a"}, {"name": "b", "use_summary": False}, {"name": "c"}]
    args = {
        "model": "vit_small_patch16_224",
        "teachers": teachers,
        "cls_token_per_teacher": True,
        "cpe_max_size": _TABLE * _PATCH,
        "register_multiple": 4,
        "hidden_size": _SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": _HEADS,
    }
    published = {
        "architectures": ["NemotronParseForConditionalGeneration"],
        "model_type": "nemotron_parse",
        "is_encoder_decoder": True,
        "encoder": {"args": args, "patch_size": _PATCH},
        "decoder": config.to_dict(),
        "image_size": [*PAGE],
        "tie_word_embeddings": False,
    }
    head = nn.ModuleDict({"lm_head": decoder.lm_head})
    write(
        directory, published, {"encoder.": encoder, "decoder.": decoder.model.decoder, "": head}, {}
    )
    (directory / "preprocessor_config.json").unlink()
    if not (directory / "tokenizer_config.json").exists():
        added = {"added_tokens_decoder": {image_token: {"content": "</s>"}}}
        (directory / "tokenizer_config.json").write_text(json.dumps(added))
    return NemotronParse(encoder, decoder, image_token)
