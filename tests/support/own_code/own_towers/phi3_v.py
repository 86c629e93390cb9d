"""Phi-3-Vision and Phi-3.5-Vision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.checkpoints.tiny import DECODER_SIZES
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_SIDE = 32
_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": _SIDE,
    "patch_size": 4,
    "hidden_act": "quick_gelu",
}


class _Embeddings(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.img_processor = transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(**_VISION, attn_implementation="eager")
        )
        joined = 4 * _VISION["hidden_size"]
        self.glb_GN = nn.Parameter(torch.zeros(1, 1, joined))
        self.sub_GN = nn.Parameter(torch.zeros(1, 1, 1, joined))
        self.img_projection = nn.Sequential(
            nn.Linear(joined, size), nn.GELU(), nn.Linear(size, size)
        )

    def forward(self, canvas: Tensor) -> Tensor:
        whole = F.interpolate(canvas[None], (_SIDE, _SIDE), mode="bicubic")[0]
        parts = self._rows(canvas), self.glb_GN[0], self._rows(whole)
        found: Tensor = self.img_projection(torch.cat(parts))
        return found

    def _rows(self, canvas: Tensor) -> Tensor:
        """Return the squares of 2 x 2 patches row by row, and an end of each row."""
        rows, columns = (length // _SIDE for length in canvas.shape[1:])
        tiles = canvas.unflatten(1, (rows, _SIDE)).unflatten(3, (columns, _SIDE))
        tiles = tiles.permute(1, 3, 0, 2, 4).flatten(0, 1)
        states = self.img_processor(tiles, output_hidden_states=True).hidden_states[-2][:, 1:]
        # Row and column of tiles, then of squares, then of the patches of a square.
        x = states.view(rows, columns, 4, 2, 4, 2, -1).permute(0, 2, 1, 4, 3, 5, 6)
        x = x.flatten(4).flatten(2, 3).flatten(0, 1)
        return torch.cat((x, self.sub_GN[0, 0].expand(len(x), 1, -1)), 1).flatten(0, 1)


def phi3_v(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a Phi-3-Vision."""
    text: dict[str, Any] = DECODER_SIZES | {
        "vocab_size": vocab_size,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    decoder = transformers.Phi3ForCausalLM(transformers.Phi3Config(**text))
    embeddings = _Embeddings(text["hidden_size"])
    fill(decoder, embeddings)
    config = text | {
        "architectures": ["Phi3VForCausalLM"],
        "model_type": "phi3_v",
        "embd_layer": {
            "embedding_cls": "image",
            "hd_transform_order": "sub_glb",
            "projection_cls": "mlp",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        },
        "img_processor": _VISION
        | {
            "image_dim_out": _VISION["hidden_size"],
            "model_name": "openai/clip-vit-large-patch14-336",
            "name": "clip_vision_model",
            "num_img_tokens": 144,
        },
    }
    processor = {"image_processor_type": "Phi3VImageProcessor", "num_crops": 2}
    parts = {"": decoder, "model.vision_embed_tokens.": embeddings}
    write(directory, config, parts, processor)

    def encode(payloads: Sequence[ImagePayload]) -> list[Tensor]:
        return [embeddings(normalized(payload)) for payload in payloads]

    return OwnCodeModel(decoder, encode, image_token)
