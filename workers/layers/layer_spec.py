"""The description of one layer of a model as data."""

from collections.abc import Sequence

import msgspec

from ...protocol.checkpoint.recurrent_layers import RecurrentLayer, ShortConvolution
from .rope import QueryScaling, RopeSpec
from .shared_block import Restart, SharedBlock
from .specs.compressed import Compression
from .specs.disentangled import InputConvolution
from .specs.experts import ExpertsSpec, GateLimit
from .specs.latent import LatentSpec
from .specs.norm_names import NormNames
from .window import BlockPattern, TokenBlocks, Window


class BlockConvolution(msgspec.Struct, frozen=True):
    """Convolutions of `num_taps` tokens over a block, with coefficients for groups of `group_size` channels."""

    num_taps: int
    group_size: int


class Difference(msgspec.Struct, frozen=True):
    """Differential attention, in which what one head of a pair attends to is subtracted from that of the other.

    `share` is the initial factor of what is subtracted. Differences are normed with `norm_eps`, and with weights if
    `has_norm_weights`. The heads of a pair are next to each other if `are_neighbors`; otherwise, the second ones follow
    all of the first ones. The second head of `num_sharing` such pairs is the same, and follows their first ones.
    """

    share: float
    norm_eps: float
    has_norm_weights: bool = False
    are_neighbors: bool = False
    num_sharing: int = 1


class LayerSpec(msgspec.Struct, frozen=True):
    """The properties that differ between layers. Those that are None or not given are as in the model."""

    # Attention.

    rope: RopeSpec | None
    """The rotary embedding; None without one."""
    window: Window | None = None
    """The positions that a token attends to; None for all.

    A token at position p attends to positions p - window + 1 .. p; in an encoder, also to as many after its own.
    """
    kv_cache_group: int = 0
    """The index of the block table that the attention reads."""
    block_pattern: BlockPattern | None = None
    """The blocks of keys to which each query head attends; None for all. Only without a window."""
    attends: bool = True
    """True if the layer attends, alone or beside a recurrent part."""
    query_scaling: QueryScaling | None = None
    """Factors on queries that depend on their positions."""
    num_heads: int | None = None
    """The number of query heads."""
    num_kv_heads: int | None = None
    """The number of key/value heads."""
    head_dim: int | None = None
    """The number of elements of a query and a key."""
    attention_scale: float | None = None
    """The factor of products of queries and keys."""
    latent: LatentSpec | None = None
    """Latent attention."""
    difference: Difference | None = None
    """Differential attention; None for the usual one."""
    has_output_bias: bool = False
    """True if the output projection has a bias, even if those of other layers have none."""
    has_value_projection: bool = True
    """True if values have a projection. Otherwise, they are the projected keys."""
    replaces_stream: bool = False
    """True if the norm of attention's input replaces the residual stream (IQuest Q1)."""
    has_sinks: bool = True
    """True if the heads of this layer have sinks; models without sinks ignore it."""
    kv_source: int | None = None
    """The index of the layer whose keys and values this layer reads; None if it has its own.

    If it `chooses_keys`, it stores copies of them beside its index keys.
    """
    chooses_keys: bool = False
    """True if the layer has its own indexer, in a model with indexers.

    In latent attention, the other layers attend to the keys that the last such layer before them chose. Otherwise, they
    attend to all keys.
    """
    compression: Compression | None = None
    """The entries of a layer of compressed attention."""
    entries_group: int = 0
    """The KV-cache group of these entries."""
    input_size: int = 0
    """If not 0, attention reads a separate input of this size instead of the hidden state. Only in a first layer."""
    input_norms: tuple[str, ...] = ()
    """The names of the norms of separate inputs for queries, keys and values, if they have separate inputs."""

    # Cross attention to an encoder's outputs, after the attention to tokens. Not with a recurrent part.

    reads_source: bool = False
    """True if the layer has cross attention."""
    cross_group: int = 0
    """The KV-cache group of its keys and values."""

    # A recurrent part, which reads the same input as attention. Their outputs are added, unless it is convolutions.

    recurrent: RecurrentLayer | None = None
    """The recurrent part; None without one."""
    state_group: int = 0
    """The KV-cache group of its state."""
    shared_block: SharedBlock | None = None
    """The block of layers with shared weights that the attention is a part of. Only in recurrent layers."""

    memory_source: int | None = None
    """The index of the recurrent layer whose outputs without a gate this layer gates, instead of attention."""
    neighbors: ShortConvolution | None = None
    """A convolution instead of attention that reads tokens on both sides, in an encoder without states (LFM2)."""

    # MLP, experts and norms.

    has_mlp: bool = True
    """True if there is an MLP, or experts."""
    intermediate_size: int | None = None
    """The number of intermediate elements of the MLP; 0 if the layer has only experts that are a shortcut."""
    experts: ExpertsSpec | None = None
    """The experts that replace the MLP."""
    gate_limit: GateLimit | None = None
    """The limit of gates in the MLP, or in the MLP that experts share."""
    activation_sparsity: float = 0.0
    """The fraction of an MLP's gates that would be below a threshold if they had a normal distribution.

    It is subtracted from the gates, and negative results become 0.
    """
    norms: NormNames | None = None
    """The names of the norms."""
    output_norm_eps: tuple[float, float] | None = None
    """The epsilons of the norms of `attention_output` and `mlp_output`."""

    block_convolution: BlockConvolution | None = None
    """Convolutions before and after attention and MLP, in a head that reads blocks of tokens (DFlash 2)."""
    input_convolution: InputConvolution | None = None
    """A convolution that is added to the layer's output, in an encoder whose norms follow its blocks."""

    # Before the layer.

    ngram_table: int | None = None
    """The index of a table of n-gram embeddings, which the layer adds first."""
    restart: Restart | None = None
    """A change of the hidden states before the layer."""
    weights: int | None = None
    """The index of the earlier layer whose weights this layer has. They differ in `restart` and `window` only."""
    token_blocks: TokenBlocks | None = None
    """The blocks within which tokens attend, beside `ModelSpec.num_global_tokens`. Only in encoders."""

    @property
    def cache_source(self) -> int | None:
        """The index of the layer whose cache this layer reads instead of its own, or None."""
        return None if self.chooses_keys else self.kv_source

    @property
    def has_dense_mlp(self) -> bool:
        """True if there is an MLP, alone or beside experts."""
        is_beside = self.experts is None or self.experts.is_shortcut or self.experts.has_own_norms
        return self.has_mlp and is_beside and self.intermediate_size != 0

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
