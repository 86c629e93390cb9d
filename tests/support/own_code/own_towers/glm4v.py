"""GLM-4V 9B."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine.protocol.encoder_inputs.payloads import ImagePayload
from safetensors.torch import load_file, save_file
from support.families.published import save_published
from support.own_code.model import fill, normalized
from torch import Tensor, nn
from torch.nn import functional as F

_SIZE, _HEADS, _OUTPUT, _PATCH, _SIDE, _FACTOR = 40, 4, 48, 4, 48, 8.0


class Glm4vModel(NamedTuple):
    """The decoder, and the function that makes the embeddings of an image and of the marks around it."""

    decoder: Any
    encode: Callable[[ImagePayload], Tensor]
    image_token: int
    marks: tuple[int, int]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits [T, V] of a prompt with images, each of which is one encoder input."""
        positions: list[int] = []
        for index, token in enumerate(tokens):
            # An image has the position after that of the mark before it.
            is_next = token == self.image_token == tokens[index - 1]
            positions.append(positions[-1] + (not is_next) if positions else 0)
        ids = torch.tensor([tokens])
        embeddings = self.decoder.get_input_embeddings()(ids).clone()
        rows = [self.encode(payload) for [payload] in images]
        if rows:
            is_image = torch.isin(ids, torch.tensor([self.image_token, *self.marks]))
            embeddings[is_image] = torch.cat(rows)
        found: Tensor = self.decoder(
            inputs_embeds=embeddings, position_ids=torch.tensor([positions])
        ).logits[0]
        return found


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.LayerNorm(_SIZE, 1e-6) for _ in range(2)
        )
        self.attention = nn.ModuleDict(
            {"query_key_value": nn.Linear(_SIZE, 3 * _SIZE), "dense": nn.Linear(_SIZE, _SIZE)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(_SIZE, 72), "fc2": nn.Linear(72, _SIZE)})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attention["query_key_value"](x).view(len(x), 3, _HEADS, -1)
        attended = F.scaled_dot_product_attention(*qkv.permute(1, 2, 0, 3))
        output = self.attention["dense"](attended.transpose(0, 1).flatten(1))
        x = x + self.input_layernorm(output)
        output = self.mlp["fc2"](F.gelu(self.mlp["fc1"](x)))
        found: Tensor = x + self.post_attention_layernorm(output)
        return found


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, _SIZE, _PATCH, _PATCH)
        self.cls_embedding = nn.Parameter(torch.zeros(1, _SIZE))
        self.position_embedding = nn.Embedding((_SIDE // _PATCH) ** 2 + 1, _SIZE)


class _Vision(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.patch_embedding = _Embedding()
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(_Layer() for _ in range(3))})
        self.linear_proj = nn.ModuleDict(
            {
                "linear_proj": nn.Linear(_OUTPUT, _OUTPUT, bias=False),
                "norm1": nn.LayerNorm(_OUTPUT),
                "dense_h_to_4h": nn.Linear(_OUTPUT, inner, bias=False),
                "gate_proj": nn.Linear(_OUTPUT, inner, bias=False),
                "dense_4h_to_h": nn.Linear(inner, _OUTPUT, bias=False),
            }
        )
        self.conv = nn.Conv2d(_SIZE, _OUTPUT, 2, 2)
        self.boi, self.eoi = (nn.Parameter(torch.zeros(1, 1, _OUTPUT)) for _ in range(2))

    def forward(self, pixels: Tensor) -> Tensor:
        embedding = self.patch_embedding
        patches = embedding.proj(pixels[None])[0].flatten(1).T
        x = torch.cat((embedding.cls_embedding, patches)) + embedding.position_embedding.weight
        for layer in self.transformer["layers"]:
            x = layer(x)
        x = self.conv(x[1:].T.unflatten(1, (_SIDE // _PATCH, -1))[None])[0].flatten(1).T
        glu = self.linear_proj
        x = F.gelu(glu["norm1"](glu["linear_proj"](x)))
        x = glu["dense_4h_to_h"](F.silu(glu["gate_proj"](x)) * glu["dense_h_to_4h"](x))
        return torch.cat((self.boi[0], x, self.eoi[0])) / _FACTOR


def glm4v_9b(directory: Path, *, vocab_size: int = 97, image_token: int = 93) -> Glm4vModel:
    """Write a GLM-4V 9B. The two tokens after that of images are the marks around them."""
    decoder = save_published("ChatGLM", directory, vocab_size=vocab_size)
    marks = image_token + 1, image_token + 2
    config = json.loads((directory / "config.json").read_text())
    vision = _Vision(config["ffn_hidden_size"])
    fill(vision)
    file = directory / "model.safetensors"
    prefix = "transformer.vision."
    own = {f"{prefix}{name}": x.clone() for name, x in vision.state_dict().items()}
    save_file(load_file(file) | own, file)
    config |= {
        "pad_token_id": image_token,
        "padded_vocab_size": vocab_size,
        "boi_token_id": marks[0],
        "eoi_token_id": marks[1],
        "vision_config": {
            "hidden_act": "gelu",
            "hidden_size": _SIZE,
            "image_size": _SIDE,
            "in_channels": 3,
            "intermediate_size": 72,
            "layer_norm_eps": 1e-6,
            "num_heads": _HEADS,
            "num_hidden_layers": 3,
            "num_positions": (_SIDE // _PATCH) ** 2 + 1,
            "patch_size": _PATCH,
            "scaling_factor": _FACTOR,
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    return Glm4vModel(decoder, lambda image: vision(normalized(image)), image_token, marks)
