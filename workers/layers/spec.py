"""The description of a decoder or an encoder as data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ...protocol.checkpoint.audio_tower import AudioTowerSpec
from ...protocol.checkpoint.model_dimensions import ModelDimensions
from ...protocol.checkpoint.recurrent_layers import RecurrentLayer
from ...protocol.checkpoint.vision.read import AnyVisionSpec
from ...protocol.config.images import SpanKind
from ...protocol.errors import ConfigError
from ..dtypes import HostDtype, rounded
from .latent_spec import LatentSpec, RopeOrder
from .rope import RopeSpec

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts, which replaces the MLP of a layer.

    The router's logits become scores by `scoring`: a softmax over all experts, or a sigmoid of each. A token takes the
    `num_experts_per_token` experts with the highest scores; `has_correction_bias` adds a stored bias to the scores
    for this choice only. With `num_groups` above 1 (DeepSeek-V3, arXiv 2412.19437), the choice is limited to the
    `num_groups_per_token` groups with the highest score, which is that of their best expert or the sum of their
    two best. The chosen experts' scores, which `renormalizes` divides by their sum, times `scale` are their weights.

    With "sparse mixer" scores (arXiv 2409.12136) the experts are chosen one after the other. The weight of each is its
    part of a softmax over those of the remaining experts whose logits are relatively within twice `mixer_noise` of it.

    With `scales_inputs` the weights multiply the inputs of the experts instead of their outputs.

    With `has_expert_scales` each expert has a stored factor on its weight. With `has_own_norms` the experts are beside
    the layer's MLP: they and the router have norms of their own, and so has the MLP's output before the sum.

    All tokens also pass an MLP of `shared_intermediate_size` elements, unless that is 0; with `has_shared_gate` its
    output is multiplied by the sigmoid of a logit.

    Experts read the hidden state, or a projection of it to `latent_size` elements if that is not 0. The sum of their
    outputs is then projected back.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid", "sparse mixer"] = "softmax"
    mixer_noise: float = 0.0
    renormalizes: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_groups_per_token: int = 1
    group_score: Literal["best", "best two"] = "best"
    has_correction_bias: bool = False
    has_router_bias: bool = False
    has_biases: bool = False
    scales_inputs: bool = False
    has_expert_scales: bool = False
    has_own_norms: bool = False
    shared_intermediate_size: int = 0
    has_shared_gate: bool = False
    latent_size: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Attention within chunks of `size` tokens: a token sees those from the start of its chunk."""

    size: int


Window = int | Chunk
"""The number of tokens that a token sees, itself included, or the chunk within which it sees."""


def first_visible(position: int, window: Window | None) -> int:
    """Return the first position that a token at this position sees."""
    if window is None:
        return 0
    if isinstance(window, Chunk):
        return position - position % window.size
    return max(position + 1 - window, 0)


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """A factor on the query at position p: 1 + `beta` * log(1 + floor((p + `offset`) / `length`))."""

    beta: float
    length: float
    offset: int = 0


@dataclass(frozen=True, slots=True)
class NormNames:
    """The checkpoint's name of each norm of a layer; None where the family has none."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None
    cross_input: str | None = None
    cross_output: str | None = None


@dataclass(frozen=True, slots=True)
class PerLayerInputsSpec:
    """A vector of `size` elements for each token and layer, which every layer adds to its output in part.

    It is the sum of a row of a table with `vocab_size` rows and of a product of the token's embedding. Tokens beyond
    the table have its first row.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """Alternating updates (arXiv 2301.13310): a token has `num_streams` hidden states.

    A layer predicts all of them, computes only the `active` one, and corrects the others by its error. With
    `scales_output` the input of the per-layer block is multiplied by a stored vector. Beside its attention a layer has
    a product of rank `laurel_rank` (LAuReL, arXiv 2411.07501).
    """

    num_streams: int
    active: int
    scales_output: bool
    laurel_rank: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties that differ between layers.

    A token at position p attends to positions p - window + 1 .. p, or to 0 .. p if `window` is None. In an encoder it
    attends to as many positions behind its own as before it. `rope` is None for
    layers without position encoding. `kv_cache_group` is the index of the block table that the layer reads. `experts`
    is None for layers with an MLP.

    `recurrent` is None for layers that only attend; its state is in the group `state_group`. A layer with a recurrent
    part need not attend. If it does, both have the same input, and their outputs are added. Without `has_mlp` a layer
    has neither MLP nor experts. `norms` replaces those of the model.

    In a model with sinks, layers without `has_sinks` have none.

    `head_dim`, `num_kv_heads` and `intermediate_size` replace those of the model where they are not None. A layer with
    a `kv_source` has no keys and values of its own: it reads those of the layer with this index. Without
    `has_value_projection` the values are the projected keys. `activation_sparsity` is the part of the MLP's gates that
    would be below a threshold if they had a normal distribution; the threshold is subtracted, and smaller ones are 0.

    With `reads_source` a second attention follows the first one, whose keys and values are made of the encoder's
    outputs. They are in the group `cross_group`. Such a layer has no recurrent part.

    With an `input_size` the attention reads so many elements that are given beside the hidden state, instead of the
    normed hidden state. Only a first layer may have it.

    If the model has an indexer, a layer that `chooses_keys` has one of its own. Others attend to the keys that the last
    one before them chose.
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
    head_dim: int | None = None
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    kv_source: int | None = None
    has_value_projection: bool = True
    activation_sparsity: float = 0.0
    reads_source: bool = False
    cross_group: int = 0
    chooses_keys: bool = False
    has_sinks: bool = True
    input_size: int = 0

    @property
    def cache_groups(self) -> tuple[int, ...]:
        """The KV-cache groups of the layer's attention and of its recurrent part or cross attention, if it has them."""
        groups = (self.kv_cache_group,) if self.attends else ()
        if self.reads_source:
            return (*groups, self.cross_group)
        return groups if self.recurrent is None else (*groups, self.state_group)


@dataclass(frozen=True, slots=True)
class ScoreHeadSpec:
    """A classification head on the pooled hidden state: output(norm(activation(dense(x)))), or output(x).

    The checkpoint's tensors are called `score_head.dense`, `score_head.norm` and `score_head.output`. With
    `token_ids` the output has the rows of these tokens in the model's own output projection, or in the embedding with
    `reads_embedding`; two rows become one, the second minus the first.
    """

    num_labels: int
    has_dense: bool = False
    dense_bias: bool = True
    activation: Literal["tanh", "relu", "gelu"] = "tanh"
    has_norm: bool = False
    output_bias: bool = False
    token_ids: tuple[int, ...] = ()
    reads_embedding: bool = False


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A convolution over the time of a sound, with `padding` zeros on both sides, and its activation.

    With `has_group_norm` the result is normed over all channels and times.
    """

    name: str
    channels: int
    kernel: int
    stride: int
    padding: int = 0
    has_bias: bool = True
    activation: Literal["gelu", "tanh"] = "gelu"
    has_group_norm: bool = False


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """The encoder of an encoder-decoder model, which makes at most `max_positions` outputs.

    With `convolutions` it starts from those of `num_inputs` features of a sound instead of token ids. With
    `has_positions` a stored table of positions is added to their results, and a sound has as many outputs as the table
    has rows.
    """

    encoder: "ModelSpec"
    max_positions: int
    convolutions: tuple[ConvolutionSpec, ...] = ()
    num_inputs: int = 0
    has_positions: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model, or an encoder if `is_causal` is false: then every token attends to all tokens.

    With `source` it is the decoder of an encoder-decoder model. Without `has_embedding` it starts from hidden states,
    and without `has_head` it ends with them.

    Norms are root-mean-square norms ("rms") or layer norms ("layer"), which may have biases. Without `has_norm_weights`
    they have no parameters. `norm_weight_offset` is added to every norm weight (Gemma stores weight - 1). With
    `has_embedding_norm` the embeddings are normed.

    With `has_gate` the MLP computes down(activation(gate(x)) * up(x)), otherwise down(activation(up(x))). With
    `is_parallel` attention and MLP of a layer read the same hidden states; the MLP shares the attention's norm if
    `norms` has none for it.

    With `qkv_bias` queries, keys and values have biases, but keys only with `key_bias`.
    With `mlp_bias` the projections of MLPs have biases, with `mlp_output_bias` only the last one.

    `qk_norm` is "head" (one norm for each head, with shared weights), "each head" (with weights of its own), "unit"
    (without weights, in layers with a rotary embedding), or "full" (one norm over all heads). With
    `rotates_before_norm` it follows the rotary embedding. `rope_order` is the order of a head's stored rows: rotation
    pairs row i with row i + R/2 of the R rotated ones ("half"), each even row with the next ("interleaved"), or row
    i + R/2 with row i ("swapped").
    With `has_value_norm` each value is divided by its root mean square. Values have `value_dim` elements if that is not
    None, and in the cache as many as keys: further ones, which nothing reads.

    With `norms_stream` the norms of `attention_output` and `mlp_output` are not applied to a block's output but to the
    residual stream after its addition (BERT, arXiv 1810.04805). Without `has_final_norm` the last layer's output is not
    normed.

    With `gates_attention` each head's output is multiplied by the sigmoid of a gate, whose projection is stored behind
    that of the head's query, or on its own with `has_gate_projection`. With `has_head_gates` a head has one gate for
    all of its elements.

    With `num_positions` the first layer's input is the sum of the embeddings of a token and of its position, which is
    row position + `position_offset` of a table. With `num_token_types` the embedding of the token's type is added,
    too: that of the first type, or of the second for token ids from `vocab_size` on, if the model tells segments of a
    prompt apart. `alibi_slopes` has the factor of each query head on the distance to a key, which is subtracted from
    the score (ALiBi, arXiv 2108.12409). With `num_distance_buckets` a number is added to the score, which each query
    head has for each bucket of distances up to `max_distance` (T5, arXiv 1910.10683). With `has_sinks` each query head
    has a score that takes part in every softmax, without a value.
    With `latent` there is one key/value head, and `head_dim` is the size of its keys in the cache.

    Hidden states are multiplied by `embedding_scale` after the embedding and every block's output by
    `residual_multiplier` before it is added. The outputs of attention, recurrent parts and MLPs, and the gates of MLPs,
    have multipliers of their own. With `has_layer_scales` each layer's output is multiplied by a stored number. Logits
    are divided by `logits_divisor`, then capped to +-`final_softcap`.

    With `encoder` the outputs of a vision or audio tower are in place of the embeddings of some tokens. If they have
    `num_deepstack_layers` further parts, each is added to the hidden states of these tokens after one of the first
    layers (DeepStack, arXiv 2406.04334).

    `tensor_names` translates the checkpoint's tensor names to those of Llama: each pair is a regular expression and its
    replacement, which are applied in order. Tensors whose names become empty are not used. With `has_grouped_qkv` one
    matrix has the rows of each key/value head together: those of its query heads, of its key and of its value. With
    `num_qkv_blocks` it has those of as many blocks of heads: of their queries, their values and their keys (CodeGen,
    arXiv 2203.13474). With `has_transposed_matrices` the layers' matrices are stored as [inputs, outputs].
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
    norms: NormNames = NormNames()
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    has_norm_weights: bool = True
    norm_weight_offset: float = 0.0
    has_embedding_norm: bool = False
    is_parallel: bool = False
    qk_norm: Literal["head", "each head", "unit", "full"] | None = None
    qk_norm_bias: bool = False
    rotates_before_norm: bool = False
    has_value_norm: bool = False
    value_dim: int | None = None
    rope_order: RopeOrder = "half"
    num_positions: int = 0
    position_offset: int = 0
    alibi_slopes: tuple[float, ...] = ()
    num_distance_buckets: int = 0
    max_distance: int = 128
    has_sinks: bool = False
    latent: LatentSpec | None = None
    qkv_bias: bool = False
    key_bias: bool = True
    attention_output_bias: bool = False
    gates_attention: bool = False
    has_gate_projection: bool = False
    has_head_gates: bool = False
    mlp_bias: bool = False
    mlp_output_bias: bool = False
    head_bias: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    recurrent_multiplier: float = 1.0
    gate_multiplier: float = 1.0
    mlp_multiplier: float = 1.0
    has_layer_scales: bool = False
    per_layer_inputs: PerLayerInputsSpec | None = None
    altup: AltUpSpec | None = None
    logits_divisor: float = 1.0
    tensor_names: tuple[tuple[str, str], ...] = ()
    has_grouped_qkv: bool = False
    num_qkv_blocks: int = 0
    has_transposed_matrices: bool = False
    is_causal: bool = True
    norms_stream: bool = False
    has_final_norm: bool = True
    num_token_types: int = 0
    score_head: ScoreHeadSpec | None = None
    encoder: AnyVisionSpec | AudioTowerSpec | None = None
    num_deepstack_layers: int = 0
    source: SourceSpec | None = None
    has_embedding: bool = True
    has_head: bool = True

    @property
    def span_kind(self) -> SpanKind | None:
        """The kind of spans in which tokens see those behind them."""
        if self.encoder is None or isinstance(self.encoder, AudioTowerSpec):
            return None
        return self.encoder.span_kind

    @property
    def tells_segments(self) -> bool:
        """True if the second text of a pair has a token type of its own. Only classification heads read pairs."""
        return self.score_head is not None and self.num_token_types > 1

    @property
    def has_rotary_axes(self) -> bool:
        """True if the rotary position of an image's token has three coordinates."""
        return any(layer.rope is not None and layer.rope.axes for layer in self.layers)

    @property
    def output_dim(self) -> int:
        """The elements that attention makes of each head's values, without latent attention."""
        return self.value_dim or self.head_dim

    @property
    def num_token_ids(self) -> int:
        """The size of the vocabulary, or twice of it if the model tells segments apart."""
        return self.vocab_size * (1 + self.tells_segments)

    def rounded_embedding_scale(self, dtype: torch.dtype | HostDtype) -> float:
        """Return the scale rounded to `dtype`, as it was when the model was trained."""
        return rounded(self.embedding_scale, dtype)

    def for_layer(self, layer: LayerSpec) -> "ModelSpec":
        """Return the spec with the sizes of one layer."""
        return replace(
            self,
            head_dim=layer.head_dim or self.head_dim,
            num_kv_heads=layer.num_kv_heads or self.num_kv_heads,
            intermediate_size=layer.intermediate_size or self.intermediate_size,
        )

    def token_elements(self, layer: LayerSpec, ranks: int = 1) -> int:
        """Return the elements of a token's keys and values in one layer's cache on one of `ranks` ranks."""
        parts = 1 if self.latent is not None else 2
        num_kv_heads = layer.num_kv_heads or self.num_kv_heads
        return parts * max(1, num_kv_heads // ranks) * (layer.head_dim or self.head_dim)

    def check_num_positions(self, max_model_len: int) -> None:
        """Raise `ConfigError` if a sequence may be longer than the table of position embeddings."""
        if max_model_len > self.num_positions:
            raise ConfigError(
                f"--max-model-len {max_model_len}: the model has embeddings of only {self.num_positions} positions"
            )

    def tensor_elements(self, ranks: int = 1) -> int:
        """Return the elements of a token in a cache tensor, which are a multiple of every layer's head size.

        A tensor has room for the layer with the most elements, or for several layers with fewer.
        """
        attending = [layer for layer in self.layers if layer.attends]
        largest = max((self.token_elements(layer, ranks) for layer in attending), default=0)
        unit = math.lcm(*(layer.head_dim or self.head_dim for layer in attending))
        return -(-largest // unit) * unit

    def stage_width(self, first_layer: int) -> int:
        """Return the elements that a pipeline stage receives for each token, for layers from `first_layer` on."""
        streams = 1 if self.altup is None else self.altup.num_streams
        per_layer = 0 if self.per_layer_inputs is None else self.per_layer_inputs.size
        inputs = sum(per_layer + layer.input_size for layer in self.layers[first_layer:])
        return streams * self.hidden_size + inputs

    @property
    def first_source(self) -> int | None:
        """The first layer whose keys and values other layers read, or None."""
        sources = [layer.kv_source for layer in self.layers if layer.kv_source is not None]
        return min(sources, default=None)

    @property
    def windows_by_group(self) -> tuple[frozenset[Window | None], ...]:
        """Return the attention windows of the layers of each KV-cache group; none for a group of states."""
        return windows_by_group(self.layers, self._num_groups)

    @property
    def cross_groups(self) -> frozenset[int]:
        """The KV-cache groups of cross attention."""
        return frozenset(layer.cross_group for layer in self.layers if layer.reads_source)

    @property
    def recurrent_by_group(self) -> tuple[RecurrentLayer | None, ...]:
        """Return the kind of recurrent layer of each KV-cache group; None for a group with attention."""
        recurrent = {layer.state_group: layer.recurrent for layer in self.layers if layer.recurrent}
        return tuple(recurrent.get(group) for group in range(self._num_groups))

    @property
    def _num_groups(self) -> int:
        return 1 + max(group for layer in self.layers for group in layer.cache_groups)

    @property
    def dimensions(self) -> ModelDimensions:
        """The sizes that determine how the model can be divided."""
        return ModelDimensions(
            len(self.layers),
            self.num_heads,
            self.num_kv_heads,
            self.intermediate_size,
            self.vocab_size,
            min((layer.experts.num_experts for layer in self.layers if layer.experts), default=0),
            next((layer.recurrent.num_units for layer in self.layers if layer.recurrent), 0),
        )


def windows_by_group(
    layers: Sequence[LayerSpec], num_groups: int
) -> tuple[frozenset[Window | None], ...]:
    """Return the attention windows of these layers in each KV-cache group; cross attention has none."""
    found: list[set[Window | None]] = [set() for _ in range(num_groups)]
    for layer in layers:
        if layer.attends:
            found[layer.kv_cache_group].add(layer.window)
        if layer.reads_source:
            found[layer.cross_group].add(None)
    return tuple(frozenset(windows) for windows in found)
