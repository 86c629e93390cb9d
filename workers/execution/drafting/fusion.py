"""The first part of a drafting head, which combines embeddings and hidden states into the input of its layer.

Shapes: T tokens, D hidden size of the head, E elements of the hidden states that the model keeps for a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ....protocol.errors import ConfigError
from .head_target import HeadTarget
from .layouts import head_layout
from .layouts.head_layout import HeadLayout
from .tensors import HeadTensors, Product


class Fusion:
    """The embedding, the norms and the projection of a drafting head.

    Args:
        layout: The layout of the head.
        tensors: The head's tensors.
        target: The model, which keeps the hidden states that the head reads.
        embed: Returns the model's embeddings of tokens, float32.

    Raises:
        CheckpointError: A tensor is missing.
        ConfigError: The head was trained for another model.
    """

    def __init__(
        self,
        layout: HeadLayout,
        tensors: HeadTensors,
        target: HeadTarget,
        embed: Callable[[Tensor], Tensor],
    ) -> None:
        self._layout, self._target, self._embed = layout, target, embed
        self._device = tensors.device
        self._size, self._eps = layout.spec.hidden_size, layout.spec.norm_eps
        self._target_size = target.spec.hidden_size

        def norm(name: str) -> Tensor | None:
            weight = tensors.find(name)
            return None if weight is None else weight + (layout.spec.norm_offset("norm") or 0.0)

        self._project_back: Product | None = None
        # The size of the embeddings and hidden states that are combined.
        size = self._size
        if head_layout.OUTPUT_PROJECTION in tensors:
            size = self._target_size
            shape = size, self._size
            self._project_back = tensors.product(head_layout.OUTPUT_PROJECTION, shape)
        self._state_size = size
        if head_layout.EMBEDDING not in tensors and size != self._target_size:
            raise ConfigError(
                f"{tensors.name}: the head's hidden size is {self._size}, the model's is {self._target_size}, and "
                "the head has no embedding; use a head for this model"
            )
        width = target.kept_width - self._target_size
        self._project: Product | None = None
        self._project_embedding: Product | None = None
        if layout.reads_streams:
            self._state_size, shape = width, (size, size)
            self._project, self._project_embedding = (
                tensors.product(each, shape)
                for each in (head_layout.PROJECTION, head_layout.EMBEDDING_PROJECTION)
            )
        elif layout.reads_kept or not layout.projects_states:
            tensors.require(head_layout.PROJECTION, "fc.weight")
            shape = self._size, width if layout.projects_states else size + self._target_size
            self._project = tensors.product(head_layout.PROJECTION, shape)
        self._states_norm = norm(head_layout.STATES_NORM)
        state_norms = [
            weight
            for i in range(width // self._target_size)
            if (weight := norm(head_layout.STATE_NORM.format(i))) is not None
        ]
        self._state_norms_ND = torch.stack(state_norms) if state_norms else None
        self._mask_states = tensors.find(head_layout.MASK_STATES)
        self._bias = tensors.find(head_layout.PROJECTION_BIAS)
        self._embedding_norm = norm(head_layout.EMBEDDING_NORM)
        self._hidden_norm = norm(head_layout.HIDDEN_NORM)
        self._embedding_scale = layout.spec.rounded_embedding_scale(tensors.dtype)
        self._embedding_VD = tensors.find(head_layout.EMBEDDING, tensors.dtype)
        if self._embedding_VD is not None and self._equals_target(self._embedding_VD):
            self._embedding_VD = None

    def _equals_target(self, embedding_VD: Tensor) -> bool:
        """Return whether the head's embedding equals the model's, judged by samples.

        If so, the model's is used for both.
        """
        if embedding_VD.shape[1] != self._target_size:
            return False
        count = min(len(embedding_VD), self._target.spec.vocab_size)
        ids = torch.linspace(0, count - 1, min(count, 256)).int().to(embedding_VD.device)
        return torch.equal(embedding_VD[ids].float() * self._embedding_scale, self._embed(ids))

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return the embeddings of tokens, float32 [T, D]."""
        if self._embedding_VD is None:
            return self._embed(ids_T)
        ids_T = ids_T.clamp(max=len(self._embedding_VD) - 1)
        return self._embedding_VD[ids_T].float() * self._embedding_scale

    def read_target(self, hidden_TE: Tensor) -> Tensor:
        """Return the part of the model's kept hidden states that the head reads, [T, D]."""
        layout, size = self._layout, self._target_size
        states = hidden_TE[:, size:] if layout.reads_kept else hidden_TE[:, :size]
        if not layout.projects_states:
            return states
        states = _norm(states.contiguous(), self._states_norm, self._eps)
        if (weights_ND := self._state_norms_ND) is not None:
            states_TND = states.unflatten(1, weights_ND.shape)
            normed_TND = F.rms_norm(states_TND, weights_ND.shape[1:], eps=self._eps) * weights_ND
            states = normed_TND.flatten(1)
        return self._projected(states)

    def read_mask(self) -> Tensor:
        """Return what the head reads in place of the unknown hidden states of a token, [1, D]."""
        assert self._mask_states is not None
        states_1E = self._mask_states.reshape(1, -1)
        unread = states_1E.new_zeros((1, self._target_size))
        return self.read_target(torch.cat((unread, states_1E), dim=1))

    def read_context(self, hidden_TE: Tensor) -> Tensor:
        """Return the projection of the model's kept hidden states after its norm, [T, D]."""
        return _norm(self.read_target(hidden_TE), self._hidden_norm, self._eps)

    def read_own(self, hidden_TE: Tensor) -> Tensor:
        """Return the part of the head's own hidden states [T, 2 D] that its next pass reads, [T, D].

        With an output projection, they have the hidden size of the model.
        """
        if self._project_back is not None:
            return self._project_back(hidden_TE[:, : self._size].contiguous())
        if self._layout.returns_normed:
            return hidden_TE[:, : self._size]
        return hidden_TE[:, self._size :]

    def no_states(self, num_tokens: int) -> Tensor:
        """Return zeros in place of the hidden states of `num_tokens` tokens, float32 [T, D]."""
        return torch.zeros((num_tokens, self._state_size), device=self._device)

    def fuse(self, embedded_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """Return the input of the head's layer, [T, D] or [T, 3 D], or all streams."""
        embedded_TD = _norm(embedded_TD, self._embedding_norm, self._eps)
        normed_TD = _norm(hidden_TD, self._hidden_norm, self._eps)
        if self._project_embedding is not None:
            streams = self._projected(normed_TD.reshape(-1, self._size))
            streams_TND = streams.view(len(embedded_TD), -1, self._size)
            return (streams_TND + self._project_embedding(embedded_TD).unsqueeze(1)).flatten(1)
        if self._layout.projects_states:
            first_TD = normed_TD if self._layout.adds_to_normed else hidden_TD
            return torch.cat((first_TD, embedded_TD, normed_TD), dim=1)
        parts = (embedded_TD, normed_TD)
        return self._projected(
            torch.cat(parts[::-1] if self._layout.has_hidden_first else parts, dim=1)
        )

    def _projected(self, x_TK: Tensor) -> Tensor:
        if self._project is None:
            return x_TK
        projected_TD = self._project(x_TK)
        return projected_TD if self._bias is None else projected_TD + self._bias


def _norm(x_TD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    if weight_D is None:
        return x_TD
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def read_token_ids(layout: HeadLayout, tensors: HeadTensors, vocab_size: int) -> Tensor | None:
    """Return the model's token id for each token of a head with its own output projection, int64; None without one.

    Args:
        layout: The layout of the head.
        tensors: The head's tensors.
        vocab_size: The size of the model's vocabulary.

    Raises:
        ConfigError: A token is not in the model's vocabulary.
    """
    if not layout.spec.has_head:
        return None
    count = layout.spec.vocab_size
    ids = torch.arange(count, device=tensors.device)
    offsets = tensors.find(head_layout.TOKEN_OFFSETS, None)
    if offsets is not None:
        if offsets.shape != (count,):
            raise ConfigError(
                f"{tensors.name}: the tensor 'd2t' has the shape {tuple(offsets.shape)}, not ({count},), the head's "
                "vocabulary; use another head"
            )
        ids += offsets.long()
    if count and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ConfigError(
            f"{tensors.name}: the head has tokens from {ids.min()} to {ids.max()}, but the model's are 0 to "
            f"{vocab_size - 1}; use a head for this model"
        )
    return ids
