"""NVILA-Lite, whose tower is transformers' SigLIP."""

from __future__ import annotations

from pathlib import Path

import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.checkpoints.tiny import DECODER_SIZES
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIZE, _SIDE = 4, 48, 20


class _Projector(nn.Module):
    """A norm of squares of 3 x 3 patches, and three products, after the first of which there is another norm."""

    def __init__(self, output: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Identity(),
            nn.LayerNorm(9 * _SIZE),
            nn.Linear(9 * _SIZE, 3 * _SIZE),
            nn.GELU(),
            nn.LayerNorm(3 * _SIZE),
            nn.Linear(3 * _SIZE, output),
            nn.GELU(),
            nn.Linear(output, output),
        )

    def forward(self, x: Tensor) -> Tensor:
        # The patches of the last row and column of squares are completed by zeros.
        grid = F.pad(x.view(5, 5, _SIZE), (0, 0, 0, 1, 0, 1))
        rows = [
            grid[row : row + 3, column : column + 3].flatten()
            for row in (0, 3)
            for column in (0, 3)
        ]
        found: Tensor = self.layers(nn.utils.rnn.pad_sequence(rows, batch_first=True))
        return found


def nvila_lite(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write an NVILA-Lite."""
    text = DECODER_SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": False}
    decoder = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text))
    vision = {
        "hidden_size": _SIZE,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "image_size": _SIDE,
        "patch_size": _PATCH,
        "vision_use_head": False,
    }
    tower = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**vision))
    projector = _Projector(text["hidden_size"])
    fill(decoder, tower, projector)

    def encode(payload: ImagePayload) -> Tensor:
        states = tower(normalized(payload)[None], output_hidden_states=True).hidden_states
        found: Tensor = projector(states[-2][0])
        return found

    config = {
        "architectures": ["NVILALiteForConditionalGeneration"],
        "model_type": "nvila_lite",
        "image_token_id": image_token,
        "text_config": text | {"model_type": "qwen2"},
        "vision_config": vision | {"model_type": "siglip_vision_model"},
    }
    parts = {"llm.": decoder, "vision_tower.vision_model.": tower, "mm_projector.": projector}
    write(directory, config, parts, {"size": {"height": _SIDE, "width": _SIDE}, "resample": 3})
    return OwnCodeModel(decoder, lambda images: [encode(each) for each in images], image_token)
