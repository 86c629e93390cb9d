"""Moondream 2 and 3, whose own code transformers does not have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.own_code.model import fill, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIDE, _MARGIN, _SIZE, _HEADS = 4, 5, 1, 32, 4
_HIDDEN, _INNER, _TEXT_HEADS, _KV_HEADS = 64, 96, 4, 2
_EXPERTS, _CHOSEN, _EXPERT_SIZE = 4, 2, 24
_MEAN = 0.5


def _mlp(size: int, inner: int, output: int) -> nn.ModuleDict:
    return nn.ModuleDict({"fc1": nn.Linear(size, inner), "fc2": nn.Linear(inner, output)})


def _feed(mlp: Any, x: Tensor) -> Tensor:
    found: Tensor = mlp["fc2"](F.gelu(mlp["fc1"](x), approximate="tanh"))
    return found


def _attention(size: int, outputs: int) -> nn.ModuleDict:
    return nn.ModuleDict({"qkv": nn.Linear(size, outputs), "proj": nn.Linear(size, size)})


class _Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_emb = nn.Linear(3 * _PATCH**2, _SIZE)
        self.pos_emb = nn.Parameter(torch.zeros(1, _SIDE**2, _SIZE))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln1": nn.LayerNorm(_SIZE),
                    "attn": _attention(_SIZE, 3 * _SIZE),
                    "ln2": nn.LayerNorm(_SIZE),
                    "mlp": _mlp(_SIZE, 48, _SIZE),
                }
            )
            for _ in range(2)
        )
        self.post_ln = nn.LayerNorm(_SIZE)
        self.proj_mlp = _mlp(2 * _SIZE, 40, _HIDDEN)

    def encode(self, crops: Tensor) -> Tensor:
        """Return the features [K, rows, columns, size] of crops [K, 3, side, side]."""
        cells = crops.unflatten(2, (-1, _PATCH)).unflatten(4, (-1, _PATCH))
        x = self.patch_emb(cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)) + self.pos_emb
        for block in self.blocks:
            parts: Any = block
            qkv = parts["attn"]["qkv"](parts["ln1"](x)).chunk(3, -1)
            q, k, v = (each.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for each in qkv)
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + parts["attn"]["proj"](attended)
            x = x + _feed(parts["mlp"], parts["ln2"](x))
        found: Tensor = self.post_ln(x).unflatten(1, (_SIDE, _SIDE))
        return found

    def forward(self, payload: ImagePayload) -> Tensor:
        """Return the embeddings of the patches of an image."""
        assert payload.fine is not None
        side, step = _SIDE * _PATCH, (_SIDE - 2 * _MARGIN) * _PATCH
        whole, canvas = _pixels(payload), _pixels(payload.fine)
        starts = [range(0, length - side + 1, step) for length in canvas.shape[1:]]
        crops = [canvas[:, y : y + side, x : x + side] for y in starts[0] for x in starts[1]]
        features = self.encode(torch.stack([whole, *crops]))
        rows = []
        for i in range(len(starts[0])):
            row = []
            for j in range(len(starts[1])):
                own = features[1 + i * len(starts[1]) + j]
                first = [_MARGIN if at else 0 for at in (i, j)]
                end = [
                    _SIDE - (_MARGIN if at < len(each) - 1 else 0)
                    for at, each in zip((i, j), starts, strict=True)
                ]
                row.append(own[first[0] : end[0], first[1] : end[1]])
            rows.append(torch.cat(row, 1))
        joined = torch.cat(rows).permute(2, 0, 1)
        means = F.adaptive_avg_pool2d(joined, (_SIDE, _SIDE)).permute(1, 2, 0)
        both = torch.cat((features[0], means), -1).flatten(0, 1)
        return _feed(self.proj_mlp, both)


def _pixels(payload: ImagePayload) -> Tensor:
    """Return the pixels [3, height, width] that are normalized in bfloat16."""
    pixels = torch.frombuffer(bytearray(payload.pixels), dtype=torch.uint8)
    values = pixels.view(payload.height, payload.width, 3).permute(2, 0, 1).bfloat16()
    return values.div_(255.0).sub_(_MEAN).div_(_MEAN).float()


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_HIDDEN, _EXPERTS)
        self.fc1 = nn.Module()
        self.fc1.weight = nn.Parameter(torch.zeros(_EXPERTS, 2 * _EXPERT_SIZE, _HIDDEN))
        self.fc2 = nn.Module()
        self.fc2.weight = nn.Parameter(torch.zeros(_EXPERTS, _HIDDEN, _EXPERT_SIZE))

    def forward(self, x: Tensor) -> Tensor:
        logits, chosen = self.router(x).topk(_CHOSEN)
        found = torch.zeros_like(x)
        first, second = (each.weight for each in (self.fc1, self.fc2))
        for t, (weights, numbers) in enumerate(zip(logits.softmax(-1), chosen, strict=True)):
            for weight, number in zip(weights, numbers, strict=True):
                h, g = (first[number] @ x[t]).chunk(2)
                found[t] += weight * (second[number] @ (F.gelu(h) * (g + 1)))
        return found


class _Text(nn.Module):
    def __init__(self, vocab_size: int, is_third: bool) -> None:
        super().__init__()
        self.is_third = is_third
        self.wte = nn.Parameter(torch.zeros(vocab_size, _HIDDEN))
        size = _HIDDEN // _TEXT_HEADS
        outputs = (_TEXT_HEADS + 2 * _KV_HEADS) * size
        self.blocks = nn.ModuleList()
        for index in range(3):
            attention = _attention(_HIDDEN, outputs)
            if is_third:
                tau = nn.Module()
                tau.alpha = nn.Parameter(torch.zeros(_TEXT_HEADS))
                for name in ("wq", "wv"):
                    setattr(tau, name, nn.Parameter(torch.zeros(_TEXT_HEADS, outputs)))
                attention["tau"] = tau
            mlp = _Experts() if is_third and index else _mlp(_HIDDEN, _INNER, _HIDDEN)
            parts = {"ln": nn.LayerNorm(_HIDDEN), "attn": attention, "mlp": mlp}
            self.blocks.append(nn.ModuleDict(parts))
        self.post_ln = nn.LayerNorm(_HIDDEN)
        self.lm_head = nn.Linear(_HIDDEN, vocab_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the logits of embeddings [T, D]."""
        for block in self.blocks:
            parts: Any = block
            normed = parts["ln"](x)
            mlp = parts["mlp"]
            fed = mlp(normed) if isinstance(mlp, _Experts) else _feed(mlp, normed)
            x = x + self._attend(parts["attn"], normed, mask) + fed
        found: Tensor = self.lm_head(self.post_ln(x))
        return found

    def _attend(self, attention: Any, x: Tensor, mask: Tensor) -> Tensor:
        qkv = attention["qkv"](x)
        size = _HIDDEN // _TEXT_HEADS
        q, k, v = qkv.unflatten(-1, (-1, size)).split([_TEXT_HEADS, _KV_HEADS, _KV_HEADS], 1)
        if self.is_third:
            tau, steps = attention["tau"], (torch.arange(len(x)) + 1.0).log()
            places = 1 + torch.sigmoid(tau.alpha * steps[:, None]) - 0.5
            scales = [torch.tanh(F.gelu(qkv) @ each.T) + places for each in (tau.wq, tau.wv)]
            q = q * scales[0][..., None]
            v = v * scales[1][:, :_KV_HEADS, None]
        theta = 1_500_000.0 if self.is_third else 10_000.0
        q, k = _rotated(q, theta), _rotated(k, theta)
        found = F.scaled_dot_product_attention(
            *(each.transpose(0, 1)[None] for each in (q, k, v)), attn_mask=mask, enable_gqa=True
        )
        projected: Tensor = attention["proj"](found[0].transpose(0, 1).flatten(1))
        return projected


def _rotated(x: Tensor, theta: float) -> Tensor:
    """Return heads [T, H, K] whose first half is rotated, the two elements of a pair next to each other."""
    half = x.shape[-1] // 2
    first, second = x[..., : half // 2], x[..., half // 2 : half]
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, half, 2) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    return torch.cat((turned, x[..., half:]), -1)


class Moondream:
    """The parts of the model, and its placeholder."""

    def __init__(self, vision: _Vision, text: _Text, image_token: int) -> None:
        self.vision, self.text, self.image_token = vision, text, image_token

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits of a prompt with images. The tokens of each attend to each other."""
        ids, count = torch.tensor(tokens), 1 + _SIDE**2
        x = self.text.wte[ids].clone()
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        places = (ids == self.image_token).nonzero()[:, 0]
        # A text without an image begins with the same token.
        places = places[len(places) % count :].view(-1, count)
        for at, [payload] in zip(places, images, strict=True):
            x[at] = torch.cat((self.text.wte[:1], self.vision(payload)))
            mask[at[0] : at[-1] + 1, at[0] : at[-1] + 1] = True
            assert all(second == first + 1 for first, second in pairwise(at.tolist()))
        logits = self.text(x, mask)
        if self.text.is_third:
            # The end of a question is never written.
            logits[:, 3] = -1e30
        return logits


def moondream(
    directory: Path, *, vocab_size: int = 96, image_token: int = 95, is_third: bool = True
) -> Moondream:
    """Write a Moondream 2, or a Moondream 3."""
    vision, text = _Vision(), _Text(vocab_size, is_third)
    fill(vision, text)
    sizes: dict[str, Any] = {
        "text": {
            "dim": _HIDDEN,
            "ff_dim": _INNER,
            "n_layers": 3,
            "n_heads": _TEXT_HEADS,
            "n_kv_heads": _KV_HEADS,
            "vocab_size": vocab_size,
        },
        "vision": {
            "enc_dim": _SIZE,
            "enc_ff_dim": 48,
            "enc_n_layers": 2,
            "enc_n_heads": _HEADS,
            "enc_patch_size": _PATCH,
            "crop_size": _SIDE * _PATCH,
            "max_crops": 6,
            "overlap_margin": _MARGIN,
            "proj_inner_dim": 40,
        },
    }
    if is_third:
        sizes["text"]["moe"] = {
            "start_layer": 1,
            "n_experts": _EXPERTS,
            "n_experts_per_tok": _CHOSEN,
            "expert_inner_dim": _EXPERT_SIZE,
        }
    config = {
        "architectures": ["HfMoondream"],
        "model_type": "moondream3" if is_third else "moondream1",
        "config": sizes,
    }
    write(directory, config, {"model.vision.": vision, "model.text.": text}, {})
    (directory / "preprocessor_config.json").unlink()
    return Moondream(vision, text, image_token)
