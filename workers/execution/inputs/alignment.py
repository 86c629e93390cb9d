"""Align a decoder's tokens with the encoder's outputs, using the cross attention of some heads.

Some heads of Whisper follow the speech with their attention, which gives the times of words (arXiv 2212.04356). The
frontend applies dynamic time warping to the matrix that is computed here.

Shapes: T tokens of a step, P tokens of a prompt, E outputs of the encoder, F of them that are read, N alignment heads
of a layer, K head dimension, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config import EngineConfig
from ...device.dtypes import torch_device
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ...loaders import Checkpoint
from ...models.cross_attention import cross_rows
from ...models.weights import weight_reader
from ..model_loader import Model

_MEDIAN_WIDTH: Final = 7
_SMALLEST_DEVIATION: Final = 1e-10


class _Prompt:
    """A prompt that is being aligned: the alignment heads' keys per layer, and their attention weights so far."""

    def __init__(self, num_frames: int, keys_of_layer: dict[int, Tensor]) -> None:
        self.num_frames = num_frames
        self.keys_of_layer = keys_of_layer
        self.weights: list[Tensor] = []


class Alignments:
    """Aligns the prompts of requests with `PoolingKind.ALIGNMENT`.

    The model passes in the queries of each step; the keys are computed again from the encoder's outputs. With tensor
    parallelism, each worker computes the heads that it has, and the workers' results are summed.
    """

    def __init__(
        self,
        model: Model,
        checkpoint: Checkpoint,
        heads: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        spec, self._shard = model.spec, model.shard
        assert spec.source is not None
        self._model = model
        self._scale = spec.attention_scale
        self._num_heads = len(heads)
        own = self._shard.heads(spec)
        self._heads: dict[int, list[int]] = {}
        for layer, head in sorted(heads):
            if layer in self._shard.layers and head in own:
                self._heads.setdefault(layer, []).append(head - own.start)
        self._keys = _read_keys(spec, self._shard, checkpoint, self._heads, device)
        self._prompts: dict[int, _Prompt] = {}
        self._queries: dict[int, Tensor] = {}

    @classmethod
    def from_config(
        cls, config: EngineConfig, model: Model, checkpoint: Checkpoint, device: torch.device
    ) -> Alignments | None:
        """Return an aligner, or None if the model names no alignment heads or has several pipeline stages."""
        audio = config.model.audio
        if audio is None or config.parallel.pipeline_parallel_size > 1:
            return None
        layers, num_heads = range(len(model.spec.layers)), model.spec.num_heads
        heads = [(i, j) for i, j in audio.alignment_heads if i in layers and j < num_heads]
        return cls(model, checkpoint, heads, device) if heads else None

    def record(self, layer: int, q_THK: Tensor) -> None:
        """Receive the queries of the step's tokens in one layer."""
        if layer in self._heads:
            self._queries[layer] = q_THK

    def add_prompt(self, slot: int, num_frames: int, encoded_ED: Tensor) -> None:
        """Start to align the prompt of a slot with the first `num_frames` outputs of the encoder."""
        num_frames = min(num_frames or len(encoded_ED), len(encoded_ED))
        keys = {
            layer: torch.einsum("ed,nkd->nek", encoded_ED.float(), keys_NKD)
            for layer, keys_NKD in self._keys.items()
        }
        self._prompts[slot] = _Prompt(num_frames, keys)
        self._model.record_queries(self)

    def remove_prompt(self, slot: int) -> None:
        """Discard the prompt of a slot."""
        if self._prompts.pop(slot, None) is not None and not self._prompts:
            self._model.record_queries(None)
            self._queries.clear()

    def add_chunk(self, slot: int, tokens: slice, *, is_first: bool) -> None:
        """Compute the attention weights for a chunk of the prompt, which consists of `tokens` of the step."""
        prompt = self._prompts[slot]
        if is_first:
            prompt.weights.clear()
        parts = [
            torch.softmax(
                torch.einsum("tnk,nek->nte", self._queries[layer][tokens, heads].float(), keys)
                * self._scale,
                -1,
            )[..., : prompt.num_frames]
            for (layer, heads), keys in zip(
                self._heads.items(), prompt.keys_of_layer.values(), strict=True
            )
        ]
        if parts:
            prompt.weights.append(torch.cat(parts))

    def finish(self, slot: int, num_tokens: int) -> Tensor:
        """Return the alignment of the whole prompt, float32 [P * F]."""
        prompt = self._prompts[slot]
        shape = num_tokens, prompt.num_frames
        total_PF = torch.zeros(shape, device=torch_device(self._model.attention.device))
        if prompt.weights:
            weights_NPF = torch.cat(prompt.weights, 1)
            deviation, mean = torch.std_mean(weights_NPF, 1, keepdim=True, correction=0)
            normed_NPF = (weights_NPF - mean) / deviation.clamp(min=_SMALLEST_DEVIATION)
            total_PF += _median(normed_NPF).sum(0)
        total_PF = self._shard.tensor_parallel.sum(total_PF)
        return (total_PF / self._num_heads).flatten()


def _median(x_NPF: Tensor) -> Tensor:
    """Return the running median over time of each row."""
    reach = _MEDIAN_WIDTH // 2
    if x_NPF.shape[-1] <= reach:
        return x_NPF
    padded = F.pad(x_NPF, (reach, reach), mode="reflect")
    return padded.unfold(-1, _MEDIAN_WIDTH, 1).sort(-1).values[..., reach]


def _read_keys(
    spec: ModelSpec,
    shard: ModelShard,
    checkpoint: Checkpoint,
    heads_of_layer: dict[int, list[int]],
    device: torch.device,
) -> dict[int, Tensor]:
    """Return the key projection [N, K, D] of the alignment heads of each layer.

    The bias of keys is omitted, because it adds the same number to all scores of a query.
    """
    assert spec.source is not None
    weights = weight_reader(
        checkpoint, torch.float32, device, has_head=False, tensor_names=spec.tensor_names
    )
    group = spec.num_heads // spec.num_kv_heads
    keys = {}
    for layer, heads in heads_of_layer.items():
        _, (rows, _) = cross_rows(spec, weights, f"layers.{layer}.cross_attn.", shard)
        shape = rows.total, spec.source.hidden_size
        matrix = weights.read(f"{rows.name}.weight", *shape, part=rows.part)
        keys[layer] = matrix.view(-1, spec.head_dim, shape[1])[[head // group for head in heads]]
    return keys
