"""The base class of decoders in torch, which adds sampling from their logits.

Shapes: T tokens of a step, S of them sampled, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...protocol.arrays import Int32Array
from ..attention import DeviceAttention
from ..batch import PersistentBatch
from ..layers.layers import LayerKernels
from ..layers.parallel.shard import ModelShard
from ..layers.spec import ModelSpec
from ..sampling import SamplerOutput, TorchSampler
from ..towers.placed import Placed
from .cross_attention import QueryRecorder
from .encoder import Encoder
from .lora.adapters import LoraAdapters
from .score_head import ScoreHead
from .stage.self_conditioning import Canvases


class TorchDecoder(ABC):
    """A model, or a shard of it, in torch, with its weights on one device."""

    loras: LoraAdapters | None = None
    """The LoRA adapters that requests may use; None without --enable-lora."""

    score_head: ScoreHead | None = None
    """The model's classification head, if it has one."""

    encoder: Encoder | None = None
    """The encoder of the model's images, audio clips or sources, if it has one."""

    is_foreign = False
    """True if the layers are computed by transformers' code instead of Engine's."""

    placed: Placed | None = None
    """The encoder outputs that the tokens of the current step read, if any."""

    kept_hidden_TE: Tensor | None = None
    """The hidden states of all tokens of the last step, float32 [T, E]: normed ones, then the input of each kept layer.

    None unless the decoder was created with kept layers.
    """

    kept_width = 0
    """The number E of elements of a token in `kept_hidden_TE`."""

    rotary_T3: Tensor | None = None
    """The rotary positions of the current step, integers [T, 3]; None if they equal the token positions."""

    earlier_TW: Tensor | None = None
    """The `ModelSpec.num_earlier_tokens` before each token of the step, the last one first; negative for none."""

    places_T1: Tensor | None = None
    """The places of the current step's tokens in their blocks, in heads whose layers read them."""
    canvases: Canvases | None = None
    """The canvases of the current step; None in models without canvases."""

    reads_T1: Tensor | None = None
    """A mask of the step's tokens that read images by cross attention, bool [T, 1]; None if none does."""

    def __init__(
        self,
        spec: ModelSpec,
        attention: DeviceAttention,
        shard: ModelShard,
        hidden_dtype: torch.dtype,
        kernels: LayerKernels,
    ) -> None:
        self.spec = spec
        self.attention = attention
        self.shard = shard
        self.hidden_dtype = hidden_dtype
        self.kernels = kernels
        self.received_width = spec.stage_width(shard.layers.start)
        """The number of elements of a token that this stage receives, unless it is the first one."""

    @abstractmethod
    def forward(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
    ) -> Tensor:
        """Fill the KV caches, and return the hidden states [T, D] in `hidden_dtype`, normed on the last stage.

        Args:
            inputs: Token ids [T] for the first stage, else hidden states [T, D] of the previous stage, which are
                overwritten.
            positions_T: Integer positions.
            kv_caches: One tensor for each layer of the shard.
            attn_metadata: The attention backend's metadata for each KV-cache group.
        """

    @abstractmethod
    def store_source(
        self, encoded_ED: Tensor, kv_caches: Sequence[Tensor], attn_metadata: Mapping[int, Any]
    ) -> None:
        """Store the keys and values of an encoder's outputs in the caches of cross attention, if there is any.

        Args:
            encoded_ED: The outputs of the encoder.
            kv_caches: The same as for `forward`.
            attn_metadata: For each cross-attention group, the attention backend's metadata of a sequence with as many
                tokens.
        """

    @abstractmethod
    def record_queries(self, recorder: QueryRecorder | None) -> None:
        """From now on, pass the queries of cross attention to `recorder`, or to nothing if it is None."""

    @abstractmethod
    def join_round(self) -> None:
        """Compute rows of other replicas, which chose experts of this rank, if replicas divide the experts."""

    @abstractmethod
    def compute_logits(self, hidden_SD: Tensor, slots_S: Int32Array | None = None) -> Tensor:
        """Return the logits [S, V] in float32, with the LoRA adapters of `slots_S`; without any if it is None."""

    def make_sampler(self, batch: PersistentBatch) -> TorchSampler:
        """Return the sampler for the requests of `batch`, which `forward_and_sample` uses from now on."""
        self._sampler = TorchSampler(
            batch.num_slots, self.spec.vocab_size, batch.device, self.kernels.choose_tokens
        )
        self._batch = batch
        return self._sampler

    def forward_and_sample(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
        rows_S: Int32Array,
        slots_S: Int32Array,
    ) -> SamplerOutput:
        """Run `forward`, and sample from the logits of its rows `rows_S`."""
        hidden_TD = self.forward(inputs, positions_T, kv_caches, attn_metadata)
        hidden_SD = hidden_TD[torch.from_numpy(rows_S).to(hidden_TD.device)]
        logits_SV = self.compute_logits(hidden_SD, slots_S)
        return self._sampler.sample(logits_SV, slots_S, self._batch.num_tokens[slots_S])
