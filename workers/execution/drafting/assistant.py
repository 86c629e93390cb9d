"""The assistants of Gemma 4: small models that propose drafts from the model's KV cache and hidden states.

An assistant is a Gemma 4 whose layers have no keys and values. `pre_projection` reduces the embedding of the next token
and the model's last hidden state to the assistant's size, and `post_projection` turns its output into the hidden state
for the next draft. The logits of the smallest assistants are computed in two steps (`use_ordered_embeddings`): the
vocabulary is divided into clusters, and only the tokens of the clusters with the best centroids have logits.

Shapes: S slots of a step, C clusters of N tokens, K of them chosen, D hidden size of the assistant.
"""

from __future__ import annotations

from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.errors import CheckpointError
from ...layers.layer_spec import LayerSpec
from ...layers.rope import TIME_AXIS
from ...layers.spec import ModelSpec
from ...loaders import Checkpoint
from ...models.families import model_spec
from .layouts.head_layout import HeadLayout, headless

ASSISTANTS: Final = {
    "Gemma4AssistantForCausalLM": "Gemma4ForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM": "Gemma4UnifiedForCausalLM",
}
"""The architectures of assistants, and those of models with the same layers."""


def is_assistant(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint is an assistant."""
    return _architecture(checkpoint) in ASSISTANTS


def _architecture(checkpoint: Checkpoint) -> str:
    return str((checkpoint.config.get("architectures") or [""])[0])


def read_assistant(target: ModelSpec, checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of an assistant for the model `target`.

    Raises:
        CheckpointError: The assistant is for a model with other layers.
    """
    fields = ConfigFields(checkpoint.config, checkpoint.config_path)
    text = fields.first_section("text_config")
    config = {
        "hidden_size_per_layer_input": 0,
        **text.config,
        "architectures": [ASSISTANTS[_architecture(checkpoint)]],
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": None,
    }
    spec = model_spec(config, fields.path)
    has_clusters = fields.boolean("use_ordered_embeddings", False)
    outside = r"^(pre_projection|post_projection|masked_embedding)\..*"
    spec = replace(
        headless(spec),
        layers=tuple(_shared(layer, spec, target, checkpoint) for layer in spec.layers),
        has_head=not has_clusters,
        tensor_names=(
            (outside + r"|^(model\.embed_tokens|lm_head)\..*" * has_clusters, ""),
            (r"^model\.embed_tokens\.", "lm_head."),
            *spec.tensor_names,
        ),
    )
    return HeadLayout(
        spec,
        ((r"^pre_projection\.", "projection."), (r"^post_projection\.", "output_projection.")),
        returns_normed=True,
        reads_cache=True,
        num_chosen_clusters=has_clusters and fields.integer("centroid_intermediate_top_k", 32),
    )


def _shared(
    layer: LayerSpec, spec: ModelSpec, target: ModelSpec, checkpoint: Checkpoint
) -> LayerSpec:
    """Return a layer that reads the cache of the model's last layer of its kind."""
    size = layer.head_dim or spec.head_dim
    sources = [
        index
        for index, other in enumerate(target.layers)
        if other.attends and (other.window is None) == (layer.window is None)
    ]
    if not sources:
        kind = "full" if layer.window is None else "sliding"
        raise CheckpointError(
            checkpoint.path,
            f"the model has no layer of {kind} attention, whose keys the assistant reads; use the assistant for this "
            "model",
        )
    other = target.layers[sources[-1]]
    if (other.head_dim or target.head_dim) != size:
        raise CheckpointError(
            checkpoint.path,
            f"the assistant has heads of {size} elements where the model has {other.head_dim or target.head_dim}; "
            "use the assistant for this model",
        )
    assert layer.rope is not None
    return replace(
        layer,
        # Tokens are rotated for another position than the one up to which they attend.
        rope=replace(layer.rope, axes=(TIME_AXIS,) * (layer.rope.rotary_dim // 2)),
        window=other.window,
        num_kv_heads=other.num_kv_heads or target.num_kv_heads,
        head_dim=size,
        kv_source=sources[-1],
        kv_cache_group=other.kv_cache_group,
    )


class ClusteredOutput:
    """An output projection that computes logits only of the tokens in the clusters with the best centroids.

    Args:
        checkpoint: The checkpoint of the assistant.
        spec: The assistant.
        num_chosen: The number of clusters whose tokens get logits.
        dtype: The dtype of the matrices.
        device: Their device.

    Raises:
        CheckpointError: A tensor is missing, or has a wrong shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        num_chosen: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        centroids_CD = checkpoint.tensor("masked_embedding.centroids.weight", dtype)
        ordering_V = checkpoint.tensor("masked_embedding.token_ordering").long()
        embedding_VD = checkpoint.tensor("model.embed_tokens.weight", dtype)
        count, size = len(centroids_CD), spec.hidden_size
        shape = spec.vocab_size, size
        if (
            embedding_VD.shape != shape
            or ordering_V.shape != shape[:1]
            or centroids_CD.shape[1] != size
            or shape[0] % count
            or not 0 <= int(ordering_V.min()) <= int(ordering_V.max()) < shape[0]
        ):
            raise CheckpointError(
                checkpoint.path,
                f"the shapes {tuple(centroids_CD.shape)}, {tuple(ordering_V.shape)} and {tuple(embedding_VD.shape)} "
                f"of masked_embedding and embed_tokens do not divide a vocabulary of {shape[0]} tokens into clusters; "
                "download it again",
            )
        if not 0 < num_chosen <= count:
            raise CheckpointError(
                checkpoint.path,
                f"centroid_intermediate_top_k chooses {num_chosen} of its {count} clusters; use 1 to {count}",
            )
        self._num_chosen = num_chosen
        self._centroids_CD = centroids_CD.to(device)
        self._ids_CN = ordering_V.view(count, -1).to(device)
        self._rows_CND = embedding_VD[ordering_V].view(count, -1, size).to(device)

    def logits(self, normed_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens with logits, int64 [S, K N], and their logits, float32 [S, K N]."""
        x_SD = normed_SD.to(self._rows_CND.dtype)
        chosen_SK = (x_SD @ self._centroids_CD.T).topk(self._num_chosen).indices
        rows_SXD = self._rows_CND[chosen_SK].flatten(1, 2)
        logits_SX = torch.bmm(rows_SXD, x_SD.unsqueeze(2)).squeeze(2)
        return self._ids_CN[chosen_SK].flatten(1), logits_SX.float()
