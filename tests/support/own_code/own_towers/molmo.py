"""Molmo 1, whose images have margins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import DECODER_SIZES
from support.own_code.model import fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIDE, _SIZE, _HEADS, _ADDED = 4, 10, 48, 4, 128
_LAYERS = (-2, -3)
TEXTS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
"""The added tokens, which follow the vocabulary."""


class _Attention(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(inputs, _SIZE) for _ in range(3))
        self.wo = nn.Linear(_SIZE, _SIZE)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        parts = (self.wq(x), self.wk(y), self.wv(y))
        q, k, v = (each.unflatten(-1, (_HEADS, -1)).transpose(-3, -2) for each in parts)
        found: Tensor = self.wo(
            F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)
        )
        return found


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(_SIZE, 80), nn.Linear(80, _SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.w1(x)
        found: Tensor = self.w2(x * torch.sigmoid(1.702 * x))
        return found


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = _Attention(_SIZE), _Mlp()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(_SIZE, 1e-5), nn.LayerNorm(_SIZE, 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y)
        found: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return found


class _Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(_SIZE))
        self.positional_embedding = nn.Parameter(torch.zeros(_SIDE**2 + 1, _SIZE))
        self.patch_embedding = nn.Linear(3 * _PATCH**2, _SIZE, bias=False)
        self.pre_ln = nn.LayerNorm(_SIZE, 1e-5)
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(_Block() for _ in range(4))})

    def forward(self, patches: Tensor) -> Tensor:
        x = torch.cat((self.class_embedding[None], self.patch_embedding(patches)))
        x, states = self.pre_ln(x + self.positional_embedding), []
        blocks: Any = self.transformer["resblocks"]
        for block in blocks:
            x = block(x)
            states.append(x[1:])
        return torch.cat([states[layer] for layer in _LAYERS], -1)


class _Backbone(nn.Module):
    def __init__(self, inner: int, output: int) -> None:
        super().__init__()
        self.image_vit, self.image_pooling_2d = _Vit(), _Attention(2 * _SIZE)
        self.image_projector = nn.ModuleDict(
            {
                "w1": nn.Linear(_SIZE, inner, bias=False),
                "w2": nn.Linear(inner, output, bias=False),
                "w3": nn.Linear(_SIZE, inner, bias=False),
            }
        )
        self.pad_embed = nn.Parameter(torch.zeros(2, 2 * _SIZE))

    def forward(self, crops: Tensor, masks: Tensor) -> Tensor:
        """Return the features [K, squares, output size] of crops [K, 3, H, W] with masks [K, patches]."""
        cells = crops.unflatten(2, (-1, _PATCH)).unflatten(4, (-1, _PATCH))
        patches = cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        x = torch.stack([self.image_vit(each) for each in patches])
        is_empty, is_part = masks == 0, (masks < 1) & (masks != 0)
        x = x + self.pad_embed[0] * is_empty[..., None] + self.pad_embed[1] * is_part[..., None]
        half = _SIDE // 2
        squares = x.view(-1, half, 2, half, 2, 2 * _SIZE).transpose(2, 3).reshape(-1, 4, 2 * _SIZE)
        x = self.image_pooling_2d(squares.mean(1, keepdim=True), squares)[:, 0]
        mlp = self.image_projector
        found: Tensor = mlp["w2"](F.silu(mlp["w1"](x)) * mlp["w3"](x))
        return found.view(len(crops), half**2, -1)


class Molmo(NamedTuple):
    """The decoder, whose embedding has the added tokens, and the part that reads images."""

    decoder: Any
    backbone: _Backbone

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits of a prompt with images."""
        ids = torch.tensor([tokens])
        embeddings = self.decoder.get_input_embeddings()(ids).clone()
        patch = self.decoder.config.vocab_size - _ADDED + TEXTS.index("<im_patch>")
        rows = [self._features(payload) for image in images for payload in image]
        if rows:
            embeddings[ids == patch] += torch.cat(rows)
        logits: Tensor = self.decoder(inputs_embeds=embeddings).logits[0]
        return logits[:, :-_ADDED]

    def _features(self, payload: ImagePayload) -> Tensor:
        """Return the features of the tokens of an image, crop by crop and then in the order of the canvas."""
        canvas = payload.fine
        assert canvas is not None
        side, step = _SIDE * _PATCH, (_SIDE - 8) * _PATCH
        pixels = normalized(canvas)
        mask = torch.zeros(canvas.height, canvas.width)
        top = (canvas.height - canvas.original_height) // 2
        left = (canvas.width - canvas.original_width) // 2
        mask[top : top + canvas.original_height, left : left + canvas.original_width] = 1
        starts = [range(0, length - side + 1, step) for length in pixels.shape[1:]]
        crops, masks = [normalized(payload)], []
        for y in starts[0]:
            for x in starts[1]:
                crops.append(pixels[:, y : y + side, x : x + side])
                cut = mask[y : y + side, x : x + side].unflatten(0, (-1, _PATCH))
                masks.append(cut.unflatten(2, (-1, _PATCH)).mean((1, 3)).flatten())
        # The masks are those of the crops, followed by one whose values are -1.
        masks.append(torch.full_like(masks[0], -1))
        features = self.backbone(torch.stack(crops), torch.stack(masks))
        half, margin = _SIDE // 2, 2
        rows = []
        for i in range(len(starts[0])):
            row = []
            for j in range(len(starts[1])):
                own = features[1 + i * len(starts[1]) + j].view(half, half, -1)
                ends = [
                    half - (margin if at < len(each) - 1 else 0)
                    for at, each in zip((i, j), starts, strict=True)
                ]
                row.append(own[margin * (i > 0) : ends[0], margin * (j > 0) : ends[1]])
            rows.append(torch.cat(row, 1))
        return torch.cat((features[0], torch.cat(rows).flatten(0, 1)))


def molmo(
    directory: Path,
    *,
    vocab_size: int = 96,
    image_token: int = 0,
    is_olmo: bool = False,
    max_crops: int = 6,
) -> Molmo:
    """Write a Molmo 1, whose decoder is like Qwen 2, or like OLMo 2.

    The added tokens are the last ones of the vocabulary if `image_token`, the token of features, is given.
    """
    if image_token:
        vocab_size = image_token - TEXTS.index("<im_patch>")
    sizes = DECODER_SIZES | {"tie_word_embeddings": False}
    text: dict[str, Any] = sizes | {"vocab_size": vocab_size + _ADDED, "rms_norm_eps": 1e-6}
    config = transformers.Qwen2Config(**text, rope_theta=1e6)
    decoder = transformers.Qwen2ForCausalLM(config)
    if is_olmo:
        decoder = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**text, rope_theta=1e6))
    backbone = _Backbone(text["intermediate_size"], text["hidden_size"])
    fill(decoder, backbone)
    published = sizes | {
        "architectures": ["MolmoForCausalLM"],
        "model_type": "molmo",
        "vocab_size": vocab_size - 2,
        "embedding_size": vocab_size,
        "attention_layer_norm": is_olmo,
        "norm_after": is_olmo,
        "qkv_bias": not is_olmo,
        "intermediate_size": 2 * text["intermediate_size"],
        "layer_norm_eps": 1e-6,
        "layer_norm_type": "rms",
        "rope_theta": 1e6,
        "weight_tying": False,
        "vit_layers": [*_LAYERS],
        "vision_config": {
            "hidden_size": _SIZE,
            "intermediate_size": 80,
            "num_hidden_layers": 4,
            "num_attention_heads": _HEADS,
            "head_dim": _SIZE // _HEADS,
            "image_size": _SIDE * _PATCH,
            "patch_size": _PATCH,
        },
    }
    processor = {
        "image_processor_type": "MolmoImageProcessor",
        "base_image_input_size": [_SIDE * _PATCH] * 2,
        "image_patch_size": _PATCH,
        "image_token_length_w": _SIDE // 2,
        "image_token_length_h": _SIDE // 2,
        "overlap_margins": [4, 4],
        "max_crops": max_crops,
    }
    write(directory, published, {"model.vision_backbone.": backbone}, processor)
    _add_tensors(directory, _renamed(decoder.state_dict(), vocab_size))
    if not (directory / "tokenizer_config.json").exists():
        added = {vocab_size + index: {"content": each} for index, each in enumerate(TEXTS)}
        names = {"added_tokens_decoder": added, "eos_token": "<|endoftext|>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return Molmo(decoder, backbone)


def _renamed(tensors: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Return the tensors of the decoder as the authors name and join them."""
    prefix = "model.transformer."
    embedding = tensors["model.embed_tokens.weight"]
    found = {
        f"{prefix}wte.embedding": embedding[:vocab_size],
        f"{prefix}wte.new_embedding": embedding[vocab_size:],
        f"{prefix}ln_f.weight": tensors["model.norm.weight"],
        f"{prefix}ff_out.weight": tensors["lm_head.weight"][:vocab_size],
    }
    names = {
        "self_attn.o_proj": "attn_out",
        "mlp.down_proj": "ff_out",
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
    }
    for index in range(2):
        old, new = f"model.layers.{index}.", f"{prefix}blocks.{index}."
        own = {name.removeprefix(old): x for name, x in tensors.items() if name.startswith(old)}
        norms = ("input_layernorm", "post_attention_layernorm")
        if norms[0] not in " ".join(own):
            norms = ("post_attention_layernorm", "post_feedforward_layernorm")
        names |= dict(zip(norms, ("attn_norm", "ff_norm"), strict=True))
        for end in ("weight", "bias"):
            if f"self_attn.q_proj.{end}" in own:
                parts = [own[f"self_attn.{each}_proj.{end}"] for each in "qkv"]
                found[f"{new}att_proj.{end}"] = torch.cat(parts)
        up, gate = (own[f"mlp.{each}_proj.weight"] for each in ("up", "gate"))
        found[f"{new}ff_proj.weight"] = torch.cat((up, gate))
        for name, other in names.items():
            if f"{name}.weight" in own:
                found[f"{new}{other}.weight"] = own[f"{name}.weight"]
    return found


def _add_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file({name: x.clone() for name, x in (load_file(file) | tensors).items()}, file)
