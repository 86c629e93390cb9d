"""A model of which transformers has the decoder, but not the part that reads images."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engine.protocol.encoder_inputs.payloads import ImagePayload
from safetensors.torch import save_file
from torch import Tensor, nn


class OwnCodeModel(NamedTuple):
    """The decoder, and the function that turns the encoder inputs of one image into embeddings."""

    decoder: Any
    encode: Callable[[Sequence[ImagePayload]], Sequence[Tensor]]
    image_token: int

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits [T, V] of a prompt with images, each of which is a list of encoder inputs."""
        ids = torch.tensor([tokens])
        embeddings = self.decoder.get_input_embeddings()(ids).clone()
        rows = [row for image in images for row in self.encode(image)]
        if rows:
            embeddings[ids == self.image_token] = torch.cat(rows)
        logits: Tensor = self.decoder(inputs_embeds=embeddings).logits[0]
        return logits


def normalized(payload: ImagePayload) -> Tensor:
    """Return the normalized pixels [3, height, width] of a tile."""
    pixels = np.frombuffer(payload.pixels, np.uint8).reshape(payload.height, payload.width, 3)
    values = (pixels * payload.scale - np.array(payload.mean)) / np.array(payload.std)
    return torch.from_numpy(values.transpose(2, 0, 1)).float()


def fill(*modules: nn.Module) -> None:
    """Give all parameters random values."""
    torch.manual_seed(5)
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.normal_(0, 0.15)
            module.float().eval()


def write(
    directory: Path,
    config: Mapping[str, Any],
    parts: Mapping[str, nn.Module],
    processor: Mapping[str, Any],
) -> None:
    """Write a checkpoint, in which the names of the tensors of each part begin with its key."""
    tensors = {
        prefix + name: tensor.contiguous().clone()
        for prefix, module in parts.items()
        for name, tensor in module.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
