"""A model of which transformers has the decoder, but not the part that reads images."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from safetensors.torch import save_file
from support.checkpoints.tiny import DECODER_SIZES
from torch import Tensor, nn


class OwnCodeModel(NamedTuple):
    """The decoder, and the function that turns the encoder inputs of one image into embeddings.

    If `window` is not 0, tokens after the prompt attend to it and to the last `window` tokens.
    """

    decoder: Any
    encode: Callable[[Sequence[ImagePayload]], Sequence[Tensor]]
    image_token: int
    window: int = 0

    @torch.inference_mode()
    def logits(
        self,
        tokens: Sequence[int],
        images: Sequence[Sequence[ImagePayload]],
        num_prompt_tokens: int = 0,
    ) -> Tensor:
        """Return the logits [T, V] of a text with images, each of which is a list of encoder inputs."""
        mask: Tensor | None = None
        if self.window:
            query, key = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))
            is_seen = (key < num_prompt_tokens) | (key > query - self.window)
            mask = torch.zeros(len(tokens), len(tokens))
            mask.masked_fill_((key > query) | ~is_seen, -torch.inf)
            mask = mask[None, None]
        embeddings = self.embeddings(tokens, images)
        logits: Tensor = self.decoder(inputs_embeds=embeddings, attention_mask=mask).logits[0]
        return logits

    @torch.inference_mode()
    def mean_state(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the mean of the last hidden states [D] of tokens, each of which attends to all."""
        mask = torch.zeros(1, 1, len(tokens), len(tokens))
        states = self.decoder(
            inputs_embeds=self.embeddings(tokens, images), attention_mask=mask
        ).last_hidden_state[0]
        mean: Tensor = states.mean(0)
        return mean

    def embeddings(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the embeddings [1, T, D] of a prompt with images."""
        ids = torch.tensor([tokens])
        embeddings = self.decoder.get_input_embeddings()(ids).clone()
        rows = [row for image in images for row in self.encode(image)]
        if rows:
            embeddings[ids == self.image_token] = torch.cat(rows)
        return embeddings


def normalized(payload: ImagePayload) -> Tensor:
    """Return the normalized pixels [3, height, width] of a tile."""
    pixels = np.frombuffer(payload.pixels, np.uint8).reshape(payload.height, payload.width, 3)
    values = (pixels * payload.scale - np.array(payload.mean)) / np.array(payload.std)
    return torch.from_numpy(values.transpose(2, 0, 1)).float()


class CrossModel(NamedTuple):
    """A decoder that reads an image by cross attention, and the function that encodes pixels [1, 3, height, width]."""

    decoder: Any
    encode: Callable[[Tensor], Tensor]
    image_token: int

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits of a text, which reads the image of `images`, if there is one."""
        states = None
        for [payload] in images:
            states = self.encode(normalized(payload)[None])
        found: Tensor = self.decoder(
            torch.tensor([tokens]), encoder_hidden_states=states, use_cache=False
        ).logits[0]
        return found


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


def decoder_sizes(vocab_size: int) -> dict[str, Any]:
    """Return the sizes of a decoder without shared embeddings, whose heads have 16 elements."""
    others = {"vocab_size": vocab_size, "tie_word_embeddings": False, "head_dim": 16}
    return DECODER_SIZES | others


def write_beside_qwen3(
    directory: Path,
    tower: nn.Module,
    config: Mapping[str, Any],
    *,
    vocab_size: int,
    patch_size: int,
) -> OwnCodeModel:
    """Write a tower that reads images of any size, and a Qwen3 beside it, whose section `config` completes."""
    text = decoder_sizes(vocab_size) | {"rope_theta": 5e6}
    decoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text))
    fill(decoder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": (2 * patch_size) ** 2 * 4,
        "max_pixels": (2 * patch_size) ** 2 * 60,
        "patch_size": patch_size,
        "merge_size": 2,
        "temporal_patch_size": 1,
    }
    parts = {
        "model.language_model.": decoder.model,
        "lm_head.": decoder.lm_head,
        "model.visual.": tower,
    }
    section = {"text_config": text | config["text_config"]}
    write(directory, {**config, **section}, parts, processor)
    return OwnCodeModel(
        decoder,
        lambda images: [tower(normalized(each)) for each in images],
        config["image_token_id"],
    )


class VitBlock(nn.Module):
    """A layer of a tower, which rotates queries and keys by `turn`. Its norms and its attention have these names."""

    def __init__(
        self,
        size: int,
        num_heads: int,
        eps: float,
        turn: Callable[[Tensor, Tensor], Tensor],
        norms: tuple[str, str] = ("norm1", "norm2"),
        attention: str = "attn",
    ) -> None:
        super().__init__()
        self._names, self._num_heads, self._turn = (*norms, attention), num_heads, turn
        for name in norms:
            self.add_module(name, nn.LayerNorm(size, eps))
        parts = {"qkv": nn.Linear(size, 3 * size), "proj": nn.Linear(size, size)}
        self.add_module(attention, nn.ModuleDict(parts))
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(size, 80), "fc2": nn.Linear(80, size)})

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        first, second, attention = (self.get_submodule(name) for name in self._names)
        assert isinstance(attention, nn.ModuleDict)
        heads = attention["qkv"](first(x)).view(len(x), 3, self._num_heads, -1)
        q, k, v = heads.permute(1, 2, 0, 3)
        q, k = self._turn(q, angles), self._turn(k, angles)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + attention["proj"](attended.transpose(0, 1).flatten(1))
        found: Tensor = x + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](second(x))))
        return found


def joined_squares(x: Tensor, columns: int) -> Tensor:
    """Return the patches [P, D] of an image, 2 x 2 of which are joined in a row, [P / 4, 4 * D]."""
    squares = x.view(-1, 2, columns // 2, 2, x.shape[1])
    return squares.transpose(1, 2).flatten(2).flatten(0, 1)


def qwen_patches(payload: ImagePayload, size: int) -> tuple[Tensor, Tensor]:
    """Return the patches of an image, square by square and with two equal frames, and its grid."""
    rows, columns = payload.height // size, payload.width // size
    cells = normalized(payload).view(3, rows // 2, 2, size, columns // 2, 2, size)
    patches = cells.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].expand(
        -1, -1, -1, -1, -1, 2, -1, -1
    )
    return patches.reshape(rows * columns, -1), torch.tensor([[1, rows, columns]])


def grid_angles(rows: int, columns: int, head_dim: int) -> Tensor:
    """Return the angles of patches, by which heads are rotated for the row and then for the column."""
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    waves = 1 / 10_000 ** (torch.arange(head_dim // 4) / (head_dim / 4))
    return torch.cat([each[:, None] * waves for each in places.unbind(1)], -1)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return heads whose first and second halves are the coordinates that `angles` rotate."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class SiglipLayer(nn.Module):
    """A layer of a SigLIP that rotates queries and keys."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(size, 1e-6) for _ in range(2))
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(size, size) for name in names})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(size, 80), "fc2": nn.Linear(80, size)})

    def forward(self, x: Tensor, angles: Tensor, sees: Tensor | None = None) -> Tensor:
        y, attn = self.layer_norm1(x), self.self_attn
        q, k, v = (
            attn[f"{name}_proj"](y).view(len(x), self._num_heads, -1).transpose(0, 1)
            for name in "qkv"
        )
        attended = nn.functional.scaled_dot_product_attention(
            rotated(q, angles), rotated(k, angles), v, sees
        )
        x = x + attn["out_proj"](attended.transpose(0, 1).flatten(1))
        inner = nn.functional.gelu(self.mlp["fc1"](self.layer_norm2(x)), approximate="tanh")
        found: Tensor = x + self.mlp["fc2"](inner)
        return found
