"""The stored description of a decoder or an encoder: which parts it has, and their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from ...protocol.config.audio.tower import AnyAudioSpec
from ...protocol.config.images.settings import SpanKind
from ..loaders.row_factors import RowFactors
from .activations import Activation
from .layer_spec import LayerSpec
from .specs.altup import AltUpSpec, PerLayerInputsSpec
from .specs.attention_residuals import AttentionResidualsSpec
from .specs.block_indexer import BlockIndexerSpec
from .specs.bottleneck import BottleneckSpec
from .specs.compressed import CompressedSpec
from .specs.disentangled import DisentangledSpec
from .specs.experts import SoftCaps
from .specs.hyper import HyperConnectionsSpec
from .specs.latent import LatentSpec, RopeOrder
from .specs.ngram import AveragedNgramSpec, NgramSpec
from .specs.norm_gate import NormGateSpec
from .specs.norm_names import NormNames
from .specs.pair_experts import PairExpertsSpec
from .specs.positions import Sinusoids
from .specs.relative_biases import PredictedStreamSpec, RelativeBiasSpec
from .specs.score_head import ScoreHeadSpec

if TYPE_CHECKING:
    # Most models need none of the modules of vision towers.
    from ...protocol.checkpoint.vision.read import AnyVisionSpec


class ModelFields(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a decoder or an encoder. A model of the Llama architecture has all defaults."""

    model_type: str
    """The name of the architecture in the checkpoint."""
    vocab_size: int
    """The number of tokens, and of rows of the embedding and the head."""
    hidden_size: int
    """The number of elements of a hidden state."""
    layers: tuple[LayerSpec, ...]
    """The properties of each layer. Some of them replace those below."""
    max_position_embeddings: int
    """The maximum length of a sequence in tokens."""
    tie_word_embeddings: bool
    """True if the head is the embedding's matrix."""
    is_causal: bool = True
    """True if a token attends only to tokens up to itself. In an encoder, every token attends to all."""

    text_spans: SpanKind | None = None
    """The spans whose tokens also attend to later tokens of the span, in a model that is causal and has no images."""

    # Embeddings: the first layer's input.

    has_embedding: bool = True
    """True if the model reads tokens. Otherwise it starts from hidden states."""
    embedding_size: int | None = None
    """The number of elements of embeddings that a linear layer makes hidden states of; None for the hidden size."""
    joins_neighbors: bool = False
    """True if that linear layer reads the embeddings of the next, the current and the previous token side by side."""
    has_narrow_head: bool = False
    """True if another linear layer makes vectors of that size of hidden states before logits are computed (OPT).

    Neither linear layer then has a bias, and a table of positions has the hidden size.
    """
    embedding_scale: float = 1.0
    """A factor on embeddings."""
    dropped_token: int | None = None
    """A token without an embedding. Those of the others are divided by their share of the prompt (ESM-2)."""
    has_embedding_norm: bool = False
    """True if embeddings are normed."""
    places_after_norm: bool = False
    """True if embeddings of images and audio replace those of tokens after the norm, so they are not normed."""
    self_conditioning_size: int = 0
    """The size of an MLP that changes the embeddings of a canvas by what the last pass predicted; 0 without canvases.

    Layers then have other layer scales for tokens before a canvas.
    """
    num_unused_embeddings: int = 0
    """The number of last rows of the embedding that belong to no token."""
    num_positions: int = 0
    """The number of rows of a table of positions, which are added to embeddings; 0 without such a table."""
    position_offset: int = 0
    """The row of the first position in that table."""
    num_unplaced: int = 0
    """The number of a prompt's first positions that have zeros in the place of stored rows (GIT)."""
    sinusoids: Sinusoids | None = None
    """Sines and cosines that are that table, which is then not stored (arXiv 1706.03762)."""
    num_token_types: int = 0
    """The number of embeddings of token types, one of which is added; 0 without token types.

    It is that of the first type. If the model distinguishes segments of a prompt, token ids from `vocab_size` on have
    the second type.
    """
    num_tasks: int = 0
    """The number of embeddings of tasks, the first of which is added to those of token types; 0 without tasks."""
    ngrams: NgramSpec | None = None
    """Embeddings of n-grams, which are added at some layers."""
    averaged_ngrams: AveragedNgramSpec | None = None
    """Embeddings of n-grams, which are averaged with those of tokens."""
    per_layer_inputs: PerLayerInputsSpec | None = None
    """Vectors of each token for each layer."""
    encoder: AnyVisionSpec | None = None
    """The tower for images, whose outputs replace embeddings."""
    audio_encoder: AnyAudioSpec | None = None
    """The tower for audio, whose outputs replace embeddings."""
    added_after: tuple[int, ...] = ()
    """The layers, from 0, after which the other parts of a tower's outputs are added (DeepStack, arXiv 2406.04334)."""

    # Norms of hidden states.

    norm_eps: float
    """The epsilon of norms."""
    norms: NormNames = NormNames()
    """The names of a layer's norms, which also say where there are norms."""
    norm_kind: Literal["rms", "layer", "affine"] = "rms"
    """Root-mean-square norms, layer norms, or only the weights and biases of norms."""
    norm_groups: int = 1
    """The number of equal parts of a hidden state that are normed separately."""
    norm_bias: bool = False
    """True if norms have biases."""
    final_norm_bias: bool = True
    """False if the final norm has no bias even where other norms have one."""
    has_norm_weights: bool = True
    """True if norms have weights. Without, they have no biases, either."""
    norm_weight_offset: float = 0.0
    """The number added to every norm weight. Gemma stores weight - 1."""
    norm_offsets: tuple[tuple[str, float], ...] = ()
    """The names of a layer's norms that have another offset, and their offsets."""
    has_final_norm: bool = True
    """True if the last layer's output is normed."""
    final_norm_offset: float | None = None
    """The offset of the final norm's weight; None for that of all norms."""
    unit_norms: tuple[str, ...] = ()
    """The names of norms without weights."""
    input_scaled_norms: tuple[str, ...] = ()
    """The names of norms that multiply by their weights before the division by the root mean square."""
    final_norm_eps: float | None = None
    """The epsilon of the final norm; None for that of all norms."""
    output_norm_eps: float | None = None
    """The epsilon of the norms of blocks' outputs; None for that of all norms."""
    norm_gate: NormGateSpec | None = None
    """The gates of some norms."""
    norms_stream: bool = False
    """True if the norms of blocks' outputs are applied to the stream after the addition (BERT, arXiv 1810.04805)."""
    has_inner_norms: bool = False
    """True if attention and MLP norm the inputs of their last products (SubLN, arXiv 2210.06423)."""

    # Sizes and projections of attention.

    num_heads: int
    """The number of query heads."""
    num_kv_heads: int
    """The number of key/value heads."""
    head_dim: int
    """The number of elements of a query and of a key in the cache."""
    value_dim: int | None = None
    """The number of elements of a value; None for that of a key, to which smaller values are padded in the cache."""
    qkv_bias: bool = False
    """True if queries, keys and values have biases."""
    key_bias: bool = True
    """True if keys have biases if queries and values have them."""
    qkv_clip: float | None = None
    """The limit of the absolute values of queries, keys and values, after their norms."""
    attention_output_bias: bool = False
    """True if the output projection has a bias."""

    query_rank: int = 0
    """The number of elements that are projected to queries, after a norm; 0 if hidden states are."""

    # Queries and keys: their norms and positions.

    qk_norm: (
        Literal["head", "keys", "only keys", "each head", "unit", "scaled", "full", "bounded"]
        | None
    ) = None
    """The norms of queries and keys.

    "head" is a norm of each head, with weights that heads share; "keys" has them for keys only, and "each head" has
    separate weights. With "only keys", queries have no norm at all (openPangu Pro MoE V2). "unit" has no weights, and
    is only in layers with a rotary embedding. "scaled" has no weights, but a factor for each key head. "full" is one
    norm of all heads. "bounded" limits the norm of each query, after a factor for each element, and of each key to
    `head_bound` (Inkling 2).
    """
    qk_norm_bias: bool = False
    """True if the norms of queries and keys have biases."""
    head_bound: float = 0.0
    """The limit of "bounded"."""
    rotates_before_norm: bool = False
    """True if the rotary embedding precedes the norm."""
    rope_order: RopeOrder = "half"
    """The order of a head's stored rows. R of them are rotated.

    Row i is rotated with row i + R/2 ("half"), each even row with the next ("interleaved"), or row i + R/2 with row i
    ("swapped").
    """
    has_value_norm: bool = False
    """True if each value is divided by its root mean square."""

    # Scores of keys.

    attention_scale: float
    """The factor of products of queries and keys."""
    attention_softcap: float | None = None
    """The limit to which scores are capped smoothly."""
    alibi_slopes: tuple[float, ...] = ()
    """The factor of each query head on the distance to a key, which is subtracted (ALiBi, arXiv 2108.12409)."""
    rounds_alibi: bool = False
    """True if ALiBi is rounded to bfloat16 and added before scores are scaled (Falcon)."""
    has_alibi_roots: bool = False
    """True if ALiBi uses the square root of the distance instead of the distance (Step 1)."""
    num_distance_buckets: int = 0
    """The number of buckets of distances, for each of which a query head adds a number (T5, arXiv 1910.10683)."""
    has_layer_distance_biases: bool = False
    """True if each layer has its own numbers for buckets (umT5, arXiv 2304.09151)."""
    max_distance: int = 128
    """The distance from which on all are in the last bucket."""
    relative_biases: RelativeBiasSpec | None = None
    """Numbers for distances that depend on the query."""
    disentangled: DisentangledSpec | None = None
    """The comparison of queries and keys with distances."""
    has_sinks: bool = False
    """True if each query head has a score without a value in every softmax."""
    projects_sinks: bool = False
    """True if that score is a projection of the hidden state."""
    num_sink_keys: int = 0
    """The number of stored keys of each key/value head whose scores are in every softmax; 0 without such keys.

    If only keys are normed, these keys are normed as well.
    """
    has_sink_values: bool = False
    """True if these keys have values. Values then have fewer elements than keys."""

    # Outputs of heads.

    norms_heads: bool = False
    """True if each head's output is divided by its root mean square, before gates."""
    gates_attention: bool = False
    """True if each head's output is multiplied by a gate, whose projection follows that of the head's query."""
    has_gate_projection: bool = False
    """True if the gates' projection is stored separately."""
    has_head_gates: bool = False
    """True if a head has one gate for all elements."""
    has_gate_biases: bool = False
    """True if gates have biases, the same for all gates of a head."""
    output_gate: Literal["sigmoid", "softplus"] = "sigmoid"
    """The function of gates."""

    # Other kinds of attention.

    latent: LatentSpec | None = None
    """Latent attention: one key/value head, whose keys have `head_dim` elements in the cache."""
    compressed: CompressedSpec | None = None
    """Compressed attention: one key/value head, whose keys are also the values."""
    block_indexer: BlockIndexerSpec | None = None
    """The indexer that chooses blocks of keys. Its key is stored in the cache as that of one more head."""

    reads_first_token: bool = False
    """True if all tokens also attend to the first one, and it to all, by projections of its own. Only in encoders."""
    summed_block_size: int = 0
    """The number of tokens of a block whose sum all tokens also attend to; 0 without sums. Only in encoders."""
    num_global_tokens: int = 0
    """The number of stored embeddings before those of a text, which read all its tokens and are read by all.

    Tokens of the text otherwise attend within `LayerSpec.token_blocks`. Only in encoders.
    """
    has_key_biases: bool = False
    """True if a number that depends on a key's value is added to its scores.

    In the cache, it is the first element of the key after the last one of the value.
    """
    has_token_scales: bool = False
    """True if queries and values have factors that depend on the token and on its position (Moondream 3)."""
    loop_window: int = 0
    """The window of layers with the weights of earlier ones, which also attend to all keys of these; 0 for no window.

    Their keys and values are their own. Then all such layers have this window.
    """
    num_span_taps: int = 0
    """The number of taps of a convolution whose outputs follow those of heads; 0 without (ConvBERT)."""
    num_attention_experts: int = 0
    """The number of experts that project queries and outputs of attention; 0 if there is one projection each.

    A token chooses as many as query heads share a key/value head.
    """

    # The MLP: down(activation(gate(x)) * up(x)).

    intermediate_size: int
    """The number of elements of up(x)."""
    activation: Activation = "silu"
    """The activation."""
    has_gate: bool = True
    """True if there is a gate. Otherwise, the MLP computes down(activation(up(x)))."""
    alternates_gates: bool = False
    """True if one matrix, "gate_up_proj", has the rows of gate(x) and up(x) in turn."""
    soft_caps: SoftCaps | None = None
    """The limits of both factors. The activation is then SiLU."""
    mlp_bias: bool = False
    """True if all projections have biases."""
    mlp_output_bias: bool = False
    """True if the last projection has a bias."""
    gate_multiplier: float = 1.0
    """A factor on the gates."""

    pair_experts: PairExpertsSpec | None = None
    """Small experts that are added to every MLP."""

    # The residual stream.

    is_parallel: bool = False
    """True if attention and MLP read the same hidden states, and share a norm if `norms` names none for the MLP."""
    residual_multiplier: float = 1.0
    """A factor on every block's output."""
    attention_multiplier: float = 1.0
    """A factor on the output of attention."""
    recurrent_multiplier: float = 1.0
    """A factor on the output of recurrent parts."""
    mlp_multiplier: float = 1.0
    """A factor on the output of MLPs."""
    averages_blocks: bool = False
    """True if a hidden state is the sum of the embedding and n blocks' outputs, divided by the root of n + 1.

    Only the epsilons of norms change, so the stream holds the sum.
    """
    residual_temperature: float = 0.0
    """If not 0, each element of a stream and of a block's normed output has its own factor.

    The factors of the output are the sigmoids of stored gates, divided by this temperature. Those of the stream keep
    the variance of the sum.
    """
    has_residual_scales: bool = False
    """True if each element of embeddings, streams and blocks' outputs has a stored bias and factor."""
    has_stream_factors: bool = False
    """True if each element of a stream has a stored factor before a block's output is added."""
    has_output_factors: bool = False
    """True if each element of a block's output is multiplied by 1 plus a stored number."""
    interpolates_blocks: bool = False
    """True if the stream x, normed, becomes (1 - a) * x + a * output after a block (nGPT, arXiv 2410.01131).

    The number a of each element is the absolute value of a stored gate, divided by the temperature.
    """
    adds_embeddings: bool = False
    """True if a layer ends with the addition of the tokens' embeddings, times a stored number."""
    has_layer_scales: bool = False
    """True if a layer's output is multiplied by a stored number."""
    altup: AltUpSpec | None = None
    """Several streams, of which a layer computes one and corrects the others."""
    hyper_connections: HyperConnectionsSpec | None = None
    """Several streams, of which every block reads and changes mixtures."""
    attention_residuals: AttentionResidualsSpec | None = None
    """Attention to the outputs of earlier blocks instead of a stream."""

    predicted_stream: PredictedStreamSpec | None = None
    """Two hidden states, of which the last layer's second one predicts the next token."""

    bottleneck: BottleneckSpec | None = None
    """The bottleneck of layers whose blocks have a smaller stream."""

    # The head.

    has_head: bool = True
    """True if the model computes logits. Otherwise it ends with hidden states."""
    num_unsampled: int = 0
    """The number of last tokens without logits."""
    silent_tokens: tuple[int, int] = (0, 0)
    """The first of several tokens that are never generated, and the first one after them."""
    head_dense_bias: bool | None = None
    """If not None, a dense layer, the activation and a norm follow the final norm, and this says if it has a bias."""
    head_bias: bool = False
    """True if logits have biases."""
    logits_divisor: float = 1.0
    """The number by which logits are divided."""
    final_softcap: float | None = None
    """The limit to which logits are then capped smoothly."""
    score_head: ScoreHeadSpec | None = None
    """The head for scores instead of logits."""

    # Tensors of the checkpoint.

    tensor_names: tuple[tuple[str, str], ...] = ()
    """Pairs of a regular expression and its replacement, which translate names in order to those of Llama.

    Tensors whose names become empty are not used.
    """
    row_factors: tuple[RowFactors, ...] = ()
    """Factors of tensors, by which they are multiplied when they are read."""
    has_grouped_qkv: bool = False
    """True if one matrix has the rows of each key/value head together: its query heads, its key and its value."""
    num_qkv_blocks: int = 0
    """If not 0, the number of blocks of heads of which that matrix consists."""
    qkv_block_order: Literal["qkv", "qvk"] = "qkv"
    """The order in each of these blocks."""
    has_grouped_kv: bool = False
    """True if one matrix, "kv_proj", has the rows of each key/value head together: its key and its value."""
    has_transposed_matrices: bool = False
    """True if the layers' matrices are stored as [inputs, outputs]."""
