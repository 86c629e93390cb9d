"""The layout of a drafting head: the names of its tensors, and which hidden states it reads.

A head predicts the token after the next one. It combines the embedding of the next token and the model's hidden state
of the last token into one vector, which passes through a decoder layer. An output projection, usually the model's own,
turns the result into logits.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.spec import ModelSpec
from ....layers.window import SpanLayers
from ....loaders.tensor_names import TensorNames

EMBEDDING: Final = "embedding.weight"
EMBEDDING_NORM: Final = "embedding_norm.weight"
HIDDEN_NORM: Final = "hidden_norm.weight"
PROJECTION: Final = "projection.weight"
EMBEDDING_PROJECTION: Final = "embedding_projection.weight"
PROJECTION_BIAS: Final = "projection.bias"
OUTPUT_PROJECTION: Final = "output_projection.weight"
STATES_NORM: Final = "states_norm.weight"
STATE_NORM: Final = "state_norms.{}.weight"
MASK_STATES: Final = "mask_states"
MARKOV_VECTORS: Final = "markov.vectors.weight"
MARKOV_MATRIX: Final = "markov.matrix.weight"
MARKOV_GATE: Final = "markov.gate.weight"
MARKOV_GATE_BIAS: Final = "markov.gate.bias"
MARKOV_STATE: Final = "markov.state.weight"
MARKOV_STATE_BIAS: Final = "markov.state.bias"
REFINER: Final = "refiner."
SELECTOR_BEFORE: Final = "selector.predecessor_codebook"
SELECTOR_AFTER: Final = "selector.successor_codebook"
SELECTOR_PROJECTION: Final = "selector.hidden_projection.weight"
TOKEN_OFFSETS: Final = "token_offsets"


class HeadLayout(msgspec.Struct, frozen=True):
    """The layout of a head in a checkpoint.

    `spec` describes its decoder layer. It has no embedding, and an output projection only if the head has its own.
    `tensor_names` translates the names of the other tensors to those above; only the projection is required.

    The projection reads the concatenation of embedding and hidden state, or of hidden state and embedding if
    `has_hidden_first`. For the first draft, the hidden state is the model's after its final norm, or the ones that the
    model keeps if `reads_kept`. For later drafts it is the head's own, after its final norm if `returns_normed`, else
    before it.

    If `projects_states`, the projection reads only hidden states of the model and reduces them to one. Without
    `reads_kept` there is no projection. The layer then reads the concatenation of the embedding and that hidden state,
    both normed. It adds its output to the hidden state, normed if `adds_to_normed`.

    If `reads_cache`, the layers have no keys and values. The `kv_source` of each is a layer of the model. Such a head
    may have another hidden size than the model, and an output projection between the two. If `num_chosen_clusters` is
    not 0, it computes only the logits of that many clusters of tokens.

    If it `reads_streams`, the hidden state consists of all residual streams of a model with hyper-connections, normed
    together. The projection is applied to each of them. The projection of the embedding is added to all.

    If it `is_parallel`, the head computes all drafts in one pass: the first as above, and the others from the token
    `mask_token_id` and stored hidden states, in place of those that are unknown.

    If `block_size` is not 0, the head predicts up to that many tokens in one pass, including the last known one, from
    `mask_token_id` in place of the others. Its layers have keys and values of the projected hidden states, which each
    layer norms like its own input if the head `norms_context`. Tokens of the block attend to each other in
    `mutual_layers`, and in others to those before them. If `num_seen_before` is not 0, all of them attend to that many
    tokens before the block. If `predicts_from_last`, the last known token predicts the first draft, and each mask token
    the draft after its own place. If it `has_markov`, drafts depend on those before them: on all if it `has_refiner`,
    else on the one before. So they do if `num_candidates` is not 0: each is chosen among that many tokens, whose logits
    are limited to `logits_softcap` if it is not 0, and multiplied by `logits_scale`. Embeddings of the block's tokens
    are multiplied by `input_scale`.

    The heads in `later` are for the second draft and later ones. Each reads the hidden states of the one before it.
    """

    spec: ModelSpec
    tensor_names: TensorNames
    has_hidden_first: bool = False
    reads_kept: bool = False
    returns_normed: bool = False
    projects_states: bool = False
    adds_to_normed: bool = False
    reads_cache: bool = False
    reads_streams: bool = False
    num_chosen_clusters: int = 0
    is_parallel: bool = False
    block_size: int = 0
    mask_token_id: int = 0
    mutual_layers: SpanLayers | None = SpanLayers.ALL
    norms_context: bool = False
    num_seen_before: int = 0
    predicts_from_last: bool = False
    has_markov: bool = False
    has_refiner: bool = False
    num_candidates: int = 0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    input_scale: float = 1.0
    later: tuple[HeadLayout, ...] = ()

    @property
    def max_drafts(self) -> int:
        """The maximum number of drafts of a block."""
        return self.block_size - 1 + self.predicts_from_last


def headless(spec: ModelSpec) -> ModelSpec:
    """Return a spec without embedding, output projection and encoder."""
    return replace(
        spec,
        has_embedding=False,
        has_head=False,
        tie_word_embeddings=False,
        head_bias=False,
        encoder=None,
        added_after=(),
        score_head=None,
    )


def read_mask_token(fields: ConfigFields, vocab_size: int) -> int:
    """Return the token that stands for unknown ones in a head that computes several drafts in one pass.

    Raises:
        CheckpointError: The config does not name it, or it is not one of `vocab_size` tokens.
    """
    own = fields.first_section("dflash_config")
    names = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    given = [own.get("mask_token_id"), *map(fields.get, names)]
    token = next((token for token in given if token is not None), None)
    return fields.with_values({"mask_token_id": token}).integer(
        "mask_token_id", minimum=0, maximum=vocab_size - 1
    )
