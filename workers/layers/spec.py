"""The description of a decoder or an encoder as data: which parts its layers have, and their sizes."""

import math
import re
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch
from msgspec.structs import replace

from ...protocol.checkpoint.recurrent_layers import NUM_TOKEN_DIGITS, RecurrentLayer
from ...protocol.checkpoint.vision.read import AnyVisionSpec
from ...protocol.config.audio_tower import AnyAudioSpec
from ...protocol.config.images import SpanKind
from ..device.dtypes import HostDtype, rounded
from ..loaders.row_factors import RowFactors
from .activations import Activation
from .rope import QueryScaling, RopeSpec
from .shared_block import Restart, SharedBlock
from .specs.altup import AltUpSpec, PerLayerInputsSpec
from .specs.attention_residuals import AttentionResidualsSpec
from .specs.block_indexer import BlockIndexerSpec
from .specs.compressed import CompressedSpec, Compression
from .specs.convolution import ConvolutionSpec
from .specs.experts import ExpertsSpec, GateLimit, SoftCaps, passed_size
from .specs.hyper import HyperConnectionsSpec
from .specs.latent import LatentSpec, RopeOrder
from .specs.ngram import NgramSpec
from .specs.norm_gate import NormGateSpec
from .specs.norm_names import NormNames
from .specs.positions import Sinusoids
from .specs.relative_biases import RelativeBiasSpec
from .specs.score_head import ScoreHeadSpec
from .window import Window


class LayerSpec(msgspec.Struct, frozen=True):
    """The properties that differ between layers.

    A token at position p attends to positions p - window + 1 .. p, or to 0 .. p if `window` is None. In an encoder it
    attends to as many positions after its own as before it. `rope` is None for layers without position encoding.
    `kv_cache_group` is the index of the block table that the layer reads. `experts` is None for layers with an MLP.

    `recurrent` is None for layers that only attend; its state is in the group `state_group`. A recurrent layer attends
    as well if `attends`: both parts read the same input, and their outputs are added, unless the recurrent part is
    convolutions within the layer. Without `has_mlp`, there is neither MLP nor experts. `norms` replaces the model's.
    `has_sinks` applies only to models with sinks.

    If not None, `num_heads`, `head_dim`, `num_kv_heads`, `attention_scale`, `latent` and `intermediate_size` override
    those of the model. `gate_limit` applies to the MLP, or to the shared MLP of a layer with experts. A layer with a
    `kv_source` has no keys and values, and reads those of the layer with this index. If it chooses keys, it stores
    copies of them beside its index keys. Unless `has_value_projection`, the values are the projected keys. Of the MLP's
    gates, a fraction `activation_sparsity` would be below a threshold if they had a normal distribution. It is
    subtracted from them, and negative results become 0.

    If `reads_source`, the attention is followed by cross attention, whose keys and values come from the encoder's
    outputs and are in the group `cross_group`. Such a layer has no recurrent part. If `input_size` is not 0, the
    attention reads a separate input of that size instead of the normed hidden state. Only a first layer may have it. If
    the model has an indexer, a layer that `chooses_keys` has its own indexer. In latent attention, the other layers
    attend to the keys that the last such layer before them chose; otherwise, they attend to all keys.

    If `shared_block` is not None, the attention is a part of that block, and the layer is recurrent, too. With
    `compression`, a layer of compressed attention has entries, which are in the group `entries_group`. If
    `output_norm_eps` is not None, it has the epsilons of the norms of `attention_output` and `mlp_output`. If
    `ngram_table` is not None, the layer begins with embeddings of n-grams, from the table with this index. If `restart`
    is not None, it changes the hidden states before the layer. If `weights` is not None, the layer has the weights of
    the earlier layer with this index, from which it differs only in its `restart`. If not empty, `input_norms` are the
    norms of separate inputs for queries, keys and values.
    """

    rope: RopeSpec | None
    window: Window | None = None
    kv_cache_group: int = 0
    experts: ExpertsSpec | None = None
    query_scaling: QueryScaling | None = None
    recurrent: RecurrentLayer | None = None
    attends: bool = True
    has_mlp: bool = True
    norms: NormNames | None = None
    state_group: int = 0
    num_heads: int | None = None
    head_dim: int | None = None
    num_kv_heads: int | None = None
    attention_scale: float | None = None
    latent: LatentSpec | None = None
    intermediate_size: int | None = None
    kv_source: int | None = None
    has_value_projection: bool = True
    activation_sparsity: float = 0.0
    reads_source: bool = False
    cross_group: int = 0
    chooses_keys: bool = False
    has_sinks: bool = True
    input_size: int = 0
    gate_limit: GateLimit | None = None
    shared_block: SharedBlock | None = None
    compression: Compression | None = None
    entries_group: int = 0
    output_norm_eps: tuple[float, float] | None = None
    restart: Restart | None = None
    weights: int | None = None
    ngram_table: int | None = None
    input_norms: tuple[str, ...] = ()

    @property
    def cache_source(self) -> int | None:
        """The index of the layer whose cache this layer reads instead of its own, or None."""
        return None if self.chooses_keys else self.kv_source

    @property
    def reads_token(self) -> bool:
        """True if the layer's experts or embeddings depend on the token."""
        return self.ngram_table is not None or bool(self.experts and self.experts.reads_token)

    @property
    def cache_groups(self) -> tuple[int, ...]:
        """The KV-cache groups of the layer's attention, and of its entries, its recurrent part or cross attention."""
        groups = (self.kv_cache_group,) if self.attends else ()
        if self.compression is not None:
            return (*groups, self.entries_group)
        if self.reads_source:
            return (*groups, self.cross_group)
        return groups if self.recurrent is None else (*groups, self.state_group)


class SourceSpec(msgspec.Struct, frozen=True):
    """The encoder of an encoder-decoder model, which computes at most `max_positions` outputs.

    Without an `encoder`, a tower computes outputs of size `output_size`. If they `are_images`, layers that read them
    do not attend to tokens, norm queries and keys, gate their outputs, and skip tokens without an image before them.
    With `convolutions`, it reads `num_inputs` features of each audio frame. If `has_positions`, outputs have a table.
    """

    encoder: "ModelSpec | None"
    max_positions: int
    output_size: int = 0
    are_images: bool = False
    convolutions: tuple[ConvolutionSpec, ...] = ()
    num_inputs: int = 0
    has_positions: bool = False

    @property
    def hidden_size(self) -> int:
        """The number of elements of an output."""
        return self.output_size if self.encoder is None else self.encoder.hidden_size


class ModelSpec(msgspec.Struct, frozen=True):
    """A decoder-only model, or an encoder if `is_causal` is false: then every token attends to all tokens.

    With `source`, it is the decoder of an encoder-decoder model. Unless `has_embedding`, it starts from hidden states,
    and unless `has_head`, it ends with them.

    Norms are root-mean-square norms ("rms") of `norm_groups` equal parts, or layer norms ("layer"), with or without
    biases. Unless `has_norm_weights`, they have no parameters. `norm_weight_offset` is added to every norm weight
    (Gemma stores weight - 1); if `final_norm_offset` is not None, it replaces this for the final norm. The norms
    called `unit_norms` have no parameters; those called `input_scaled_norms` multiply by their weights before the
    division by the root mean square. If `output_norm_eps` is not None, it is the epsilon of the norms of blocks'
    outputs. If `has_embedding_norm`, the embeddings are normed, those of tokens only if `places_after_norm`: then
    encoder outputs replace them after the norm. With `norm_gate`, some norms have gates.

    If `has_gate`, the MLP computes down(activation(gate(x)) * up(x)), otherwise down(activation(up(x))). With
    `soft_caps`, both factors are capped, and the activation is SiLU. If `is_parallel`, attention and MLP of a layer
    read the same hidden states; the MLP shares the attention's norm if `norms` has none for it. If `qkv_bias`, queries
    and values have biases, and keys if `key_bias`. All three are limited to +-`qkv_clip`, after their norms. If
    `mlp_bias`, all projections of MLPs have biases; if `mlp_output_bias`, only the last one.

    `qk_norm` is "head" (one norm per head, with shared weights), "each head" (with separate weights), "unit" (without
    weights, in layers with a rotary embedding), "scaled" (without weights, but a factor for each key head), or "full"
    (one norm over all heads). If "bounded", the norm of each query, after a factor for each element, and of each key is
    limited to `head_bound` (Inkling 2). If `rotates_before_norm`, it follows the rotary embedding. `rope_order` is the
    order of a head's stored rows: of the R rotated rows, row i is rotated with row i + R/2 ("half"), each even row with
    the next ("interleaved"), or row i + R/2 with row i ("swapped"). If `has_value_norm`, each value is divided by its
    root mean square. If `value_dim` is not None, it is the size of values, which are padded to that of keys in the
    cache.

    If `norms_stream`, the norms of `attention_output` and `mlp_output` are not applied to a block's output but to the
    residual stream after its addition (BERT, arXiv 1810.04805). The last layer's output is normed if `has_final_norm`.

    If `gates_attention`, each head's output is multiplied by the sigmoid or the softplus of a gate, as `output_gate`
    says. The gate's projection is stored after that of the head's query, or separately if `has_gate_projection`. With
    `has_head_gates`, a head has one gate for all elements. With `has_gate_biases`, a head's gates have the same bias.

    If `norms_heads`, each head's output is divided by its root mean square before it is multiplied by gates. If
    `has_inner_norms`, the heads' outputs together have a norm before the output projection, and the intermediate
    elements of an MLP before its last product (SubLN, arXiv 2210.06423).

    If `num_positions` is not 0, the first layer's input is the sum of the embeddings of a token and of its position,
    which is row position + `position_offset` of a table. With `sinusoids`, the table is not stored, but consists of
    sines and cosines (arXiv 1706.03762). If `num_token_types` is not 0, the embedding of the token's type is added as
    well: the first type, or the second for token ids from `vocab_size` on, if the model distinguishes segments of a
    prompt. `alibi_slopes` has the factor of each query head on the distance to a key, which is subtracted from the
    score (ALiBi, arXiv 2108.12409). If `rounds_alibi`, the factor times the key's position, a product of bfloat16
    numbers, is added to the score before it is scaled instead (Falcon). If `num_distance_buckets` is not 0, each query
    head adds a number to the score for each bucket of distances up to `max_distance` (T5, arXiv 1910.10683); with
    `has_layer_distance_biases`, each layer has its own numbers (umT5, arXiv 2304.09151). With `relative_biases`, the
    number depends on the query, too. If `has_sinks`, each query head has one valueless score in every softmax; if
    `projects_sinks`, it is a product of the hidden state.

    With `latent`, there is one key/value head, and `head_dim` is the size of its keys in the cache. With `compressed`,
    there is one, too, and its keys are also the values. With `block_indexer`, each index key is stored in the cache as
    one more head's key. The last `num_unused_embeddings` rows of the embedding belong to no token, and the last
    `num_unsampled` tokens have no logits.

    Embeddings are multiplied by `embedding_scale`, and every block's output by `residual_multiplier` before it is
    added. If `averages_blocks`, a hidden state is the sum of the embedding and the outputs of n blocks, divided by the
    square root of n + 1. Only the epsilons of norms change, so the stream holds the sum. If `residual_temperature` is
    not 0, each element of a stream and of a block's normed output has its own factor: those of the output are the
    sigmoids of stored gates, divided by this temperature, and those of the stream keep the variance of the sum. If
    `has_residual_scales`, each element of embeddings, streams and blocks' outputs has a stored bias and factor. If
    `interpolates_blocks`, the stream is normed to x before a block, and then becomes (1 - a) * x + a * output, where a
    is the absolute value of a stored gate divided by the temperature (nGPT, arXiv 2410.01131). The outputs of
    attention, recurrent parts and MLPs, and the gates of MLPs, have their own multipliers. If `has_layer_scales`, a
    layer's output is multiplied by a stored number. Unless `head_dense_bias` is None, a dense layer, the activation and
    a norm follow the final norm. Logits are divided by `logits_divisor`, then capped to +-`final_softcap`.

    The outputs of towers (`encoder`, `audio_encoder`) replace embeddings. If they have `num_deepstack_layers` other
    parts, each is added to the hidden states of these tokens after one of the first layers (arXiv 2406.04334).

    `tensor_names` translates the checkpoint's tensor names to those of Llama: each pair is a regular expression and its
    replacement, which are applied in order. Tensors whose names become empty are not used. Tensors are multiplied by
    `row_factors` when they are read. If `has_grouped_qkv`, one matrix has the rows of each key/value head together: its
    query heads, its key and its value. If `num_qkv_blocks` is not 0, it consists of that many blocks of heads, each in
    the order `qkv_block_order`. If `has_transposed_matrices`, the layers' matrices are stored as [inputs, outputs].
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    norm_eps: float
    attention_scale: float
    tie_word_embeddings: bool
    activation: Activation = "silu"
    has_gate: bool = True
    soft_caps: SoftCaps | None = None
    norms: NormNames = NormNames()
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_groups: int = 1
    norm_bias: bool = False
    has_norm_weights: bool = True
    norm_weight_offset: float = 0.0
    final_norm_offset: float | None = None
    unit_norms: tuple[str, ...] = ()
    input_scaled_norms: tuple[str, ...] = ()
    output_norm_eps: float | None = None
    has_embedding_norm: bool = False
    places_after_norm: bool = False
    norm_gate: NormGateSpec | None = None
    is_parallel: bool = False
    qk_norm: Literal["head", "each head", "unit", "scaled", "full", "bounded"] | None = None
    qk_norm_bias: bool = False
    head_bound: float = 0.0
    rotates_before_norm: bool = False
    has_value_norm: bool = False
    value_dim: int | None = None
    rope_order: RopeOrder = "half"
    num_positions: int = 0
    position_offset: int = 0
    sinusoids: Sinusoids | None = None
    num_unused_embeddings: int = 0
    num_unsampled: int = 0
    alibi_slopes: tuple[float, ...] = ()
    rounds_alibi: bool = False
    num_distance_buckets: int = 0
    has_layer_distance_biases: bool = False
    max_distance: int = 128
    relative_biases: RelativeBiasSpec | None = None
    has_sinks: bool = False
    projects_sinks: bool = False
    latent: LatentSpec | None = None
    compressed: CompressedSpec | None = None
    block_indexer: BlockIndexerSpec | None = None
    qkv_bias: bool = False
    key_bias: bool = True
    qkv_clip: float | None = None
    attention_output_bias: bool = False
    gates_attention: bool = False
    has_gate_projection: bool = False
    has_head_gates: bool = False
    has_gate_biases: bool = False
    output_gate: Literal["sigmoid", "softplus"] = "sigmoid"
    norms_heads: bool = False
    has_inner_norms: bool = False
    mlp_bias: bool = False
    mlp_output_bias: bool = False
    head_dense_bias: bool | None = None
    head_bias: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    averages_blocks: bool = False
    residual_temperature: float = 0.0
    has_residual_scales: bool = False
    interpolates_blocks: bool = False
    attention_multiplier: float = 1.0
    recurrent_multiplier: float = 1.0
    gate_multiplier: float = 1.0
    mlp_multiplier: float = 1.0
    has_layer_scales: bool = False
    per_layer_inputs: PerLayerInputsSpec | None = None
    altup: AltUpSpec | None = None
    hyper_connections: HyperConnectionsSpec | None = None
    attention_residuals: AttentionResidualsSpec | None = None
    ngrams: NgramSpec | None = None
    logits_divisor: float = 1.0
    tensor_names: tuple[tuple[str, str], ...] = ()
    row_factors: tuple[RowFactors, ...] = ()
    has_grouped_qkv: bool = False
    num_qkv_blocks: int = 0
    qkv_block_order: Literal["qkv", "qvk"] = "qkv"
    has_transposed_matrices: bool = False
    is_causal: bool = True
    norms_stream: bool = False
    has_final_norm: bool = True
    num_token_types: int = 0
    score_head: ScoreHeadSpec | None = None
    encoder: AnyVisionSpec | None = None
    audio_encoder: AnyAudioSpec | None = None
    num_deepstack_layers: int = 0
    source: SourceSpec | None = None
    has_embedding: bool = True
    has_head: bool = True

    @property
    def span_kind(self) -> SpanKind | None:
        """The kind of spans whose tokens also attend to later tokens of the span, or None."""
        return None if self.encoder is None else self.encoder.span_kind

    @property
    def tells_segments(self) -> bool:
        """True if the second text of a pair has its own token type. Only classification heads read pairs."""
        return self.num_token_types > 1 and ScoreHeadSpec.reads_pairs(self.score_head)

    @property
    def rotary_axes(self) -> set[int]:
        """The axes that rotations use (see `RopeSpec`); empty if rotary positions have one coordinate."""
        return {axis for layer in self.layers if layer.rope is not None for axis in layer.rope.axes}

    def norm_offset(self, name: str) -> float | None:
        """Return what is added to the weight of the norm called `name`; None if it has no weight."""
        if not self.has_norm_weights or name.rpartition(".")[2] in self.unit_norms:
            return None
        if name == "norm" and self.final_norm_offset is not None:
            return self.final_norm_offset
        return self.norm_weight_offset

    def hidden_norm_eps(self, name: str) -> float:
        """Return the epsilon of the norm called `name` of hidden states or of a block's output."""
        count = 2 * len(self.layers) + 1
        if match := re.fullmatch(r"layers\.(\d+)\.(\w+)", name):
            layer = self.layers[int(match[1])]
            norms = layer.norms or self.norms
            outputs = (norms.attention_output, norms.mlp_output)
            if match[2] in outputs:
                shared = self.norm_eps if self.output_norm_eps is None else self.output_norm_eps
                return (layer.output_norm_eps or (shared, shared))[outputs.index(match[2])]
            count = 2 * int(match[1]) + 1 + (match[2] == norms.mlp_input)
        return self.norm_eps * count if self.averages_blocks else self.norm_eps

    def scales_input(self, name: str) -> bool:
        """Return whether the norm called `name` multiplies by its weight first."""
        return name.rpartition(".")[2] in self.input_scaled_norms

    @property
    def index_dim(self) -> int:
        """The number of elements in the cache for a token's index key; 0 without an indexer."""
        indexer = self.block_indexer or (self.latent and self.latent.indexer)
        return indexer.key_elements if indexer else 0

    @property
    def output_dim(self) -> int:
        """The number of output elements of attention per head. Not for latent attention."""
        return self.value_dim or self.head_dim

    @property
    def num_token_ids(self) -> int:
        """The number of valid token ids: the vocabulary, or twice that if segments of a prompt are distinguished."""
        return self.vocab_size * (1 + self.tells_segments)

    def rounded_embedding_scale(self, dtype: torch.dtype | HostDtype) -> float:
        """Return the embedding scale rounded to `dtype`, as it was when the model was trained."""
        return rounded(self.embedding_scale, dtype)

    def for_layer(self, layer: LayerSpec) -> "ModelSpec":
        """Return the spec with the sizes of one layer instead of the model's."""
        return replace(
            self,
            num_heads=layer.num_heads or self.num_heads,
            head_dim=layer.head_dim or self.head_dim,
            num_kv_heads=layer.num_kv_heads or self.num_kv_heads,
            attention_scale=layer.attention_scale or self.attention_scale,
            latent=layer.latent or self.latent,
            intermediate_size=layer.intermediate_size or self.intermediate_size,
        )

    def token_elements(self, layer: LayerSpec, ranks: int = 1) -> tuple[int, ...]:
        """Return the number of elements of a token in each attention cache of one layer on one of `ranks` ranks.

        The first cache has keys and values. A rank has all index keys.
        """
        if self.compressed is not None:
            return self.compressed.token_elements(self.head_dim, layer.compression)
        parts = 1 if self.latent is not None else 2
        num_kv_heads = layer.num_kv_heads or self.num_kv_heads
        num_parts = parts * max(1, num_kv_heads // ranks)
        if self.block_indexer is not None and layer.chooses_keys:
            num_parts += 1
        return (num_parts * (layer.head_dim or self.head_dim),)

    def tensor_elements(self, ranks: int = 1) -> int:
        """Return the number of elements per token in a cache tensor, a multiple of every layer's head size.

        A tensor has space for the layer with the most elements, or for several layers with fewer.
        """
        if self.compressed is not None:
            compressions = [layer.compression for layer in self.layers]
            return self.compressed.block_elements(self.head_dim, compressions)
        attending = [layer for layer in self.layers if layer.attends]
        largest = max((self.token_elements(layer, ranks)[0] for layer in attending), default=0)
        unit = math.lcm(*(layer.head_dim or self.head_dim for layer in attending))
        return -(-largest // unit) * unit

    def stage_width(self, first_layer: int) -> int:
        """Return the number of elements that a pipeline stage with layers from `first_layer` on receives per token."""
        per_layer = 0 if self.per_layer_inputs is None else self.per_layer_inputs.size
        inputs = sum(per_layer + layer.input_size for layer in self.layers[first_layer:])
        inputs += self.hidden_size * (first_layer <= self.last_shared_block)
        inputs += NUM_TOKEN_DIGITS * (first_layer <= self.last_token_layer)
        inputs += passed_size(layer.experts for layer in self.layers[first_layer:])
        if any(layer.restart for layer in self.layers[first_layer:]):
            inputs += self.num_kept_states * self.hidden_size
        return (self.num_streams or 1) * self.hidden_size + inputs

    @property
    def num_kept_states(self) -> int:
        """The number of hidden states of a token that layers keep for others."""
        restarts = [layer.restart for layer in self.layers if layer.restart is not None]
        return max((1 + each.keeps for each in restarts if each.keeps is not None), default=0)

    @property
    def num_streams(self) -> int:
        """The number of hidden states of a token; 0 for one that is a residual stream."""
        streams = self.altup or self.hyper_connections or self.attention_residuals
        return streams.num_streams if streams else 0

    @property
    def last_shared_block(self) -> int:
        """The index of the last layer that uses a shared block, or -1. Layers up to it get the tokens' embeddings."""
        return max((i for i, layer in enumerate(self.layers) if layer.shared_block), default=-1)

    @property
    def last_token_layer(self) -> int:
        """The index of the last layer that reads tokens, or -1. Layers up to it get them."""
        return max((i for i, layer in enumerate(self.layers) if layer.reads_token), default=-1)

    @property
    def windows_by_group(self) -> tuple[frozenset[Window | None], ...]:
        """Return the attention windows of the layers in each KV-cache group; empty for groups of recurrent states."""
        return windows_by_group(self.layers, self._num_groups)

    @property
    def cross_groups(self) -> frozenset[int]:
        """The KV-cache groups of cross attention."""
        return frozenset(layer.cross_group for layer in self.layers if layer.reads_source)

    @property
    def recurrent_by_group(self) -> tuple[RecurrentLayer | None, ...]:
        """Return the recurrent layers' description for each KV-cache group; None for groups of attention."""
        recurrent = {layer.state_group: layer.recurrent for layer in self.layers if layer.recurrent}
        return tuple(recurrent.get(group) for group in range(self._num_groups))

    @property
    def _num_groups(self) -> int:
        return 1 + max(group for layer in self.layers for group in layer.cache_groups)


def windows_by_group(
    layers: Sequence[LayerSpec], num_groups: int
) -> tuple[frozenset[Window | None], ...]:
    """Return the attention windows of these layers in each KV-cache group, not counting cross attention."""
    found: list[set[Window | None]] = [set() for _ in range(num_groups)]
    for layer in layers:
        if layer.attends:
            found[layer.kv_cache_group].add(layer.window)
        if layer.reads_source:
            found[layer.cross_group].add(None)
        if layer.compression is not None:
            found[layer.entries_group].add(None)
    return tuple(frozenset(windows) for windows in found)
