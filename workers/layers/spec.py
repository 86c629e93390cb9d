"""The description of a decoder or an encoder as data, and what follows from it."""

import math
import re

import msgspec
import torch
from msgspec.structs import replace

from ...protocol.checkpoint.recurrent_layers import NUM_TOKEN_DIGITS, RecurrentLayer, Rwkv7
from ...protocol.config.images.settings import SpanKind
from ..device.dtypes import HostDtype, rounded
from .layer_spec import LayerSpec, windows_by_group
from .model_fields import ModelFields
from .specs.convolution import ConvolutionSpec
from .specs.experts import passed_size
from .specs.score_head import ScoreHeadSpec
from .window import Window


class SourceSpec(msgspec.Struct, frozen=True):
    """The encoder of an encoder-decoder model, which computes at most `max_positions` outputs.

    Without an `encoder`, a tower computes outputs of size `output_size`. If they `are_images`, layers that read them
    skip tokens without an image before them. Such layers that do not attend to tokens gate their outputs. If
    `has_norms`, queries and keys of cross attention are normed. With `convolutions`, it reads `num_inputs` features of
    each audio frame. If `has_positions`, outputs have a table. If `first_sinusoid` is not None, the outputs of
    convolutions, multiplied by `output_scale`, have sinusoids from this position on.
    """

    encoder: "ModelSpec | None"
    max_positions: int
    output_size: int = 0
    are_images: bool = False
    has_norms: bool = False
    convolutions: tuple[ConvolutionSpec, ...] = ()
    num_inputs: int = 0
    has_positions: bool = False
    first_sinusoid: int | None = None
    output_scale: float = 1.0

    @property
    def hidden_size(self) -> int:
        """The number of elements of an output."""
        return self.output_size if self.encoder is None else self.encoder.hidden_size


class ModelSpec(ModelFields, frozen=True, kw_only=True):
    """A model: its properties, and what follows from them."""

    source: SourceSpec | None = None
    """The encoder, if the model is the decoder of an encoder-decoder model."""

    @property
    def span_kind(self) -> SpanKind | None:
        """The kind of spans whose tokens also attend to later tokens of the span, or None."""
        return self.text_spans if self.encoder is None else self.encoder.span_kind

    @property
    def longest_window(self) -> int:
        """The largest number of tokens in a window of a layer; 0 without windows."""
        return max(
            (layer.window for layer in self.layers if isinstance(layer.window, int)), default=0
        )

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
        return dict(self.norm_offsets).get(name.rpartition(".")[2], self.norm_weight_offset)

    def has_norm_bias(self, name: str) -> bool:
        """Return whether the norm called `name` has a bias."""
        return self.norm_bias and (self.final_norm_bias or name != "norm")

    def hidden_norm_eps(self, name: str) -> float:
        """Return the epsilon of the norm called `name` of hidden states or of a block's output."""
        if name == "norm" and self.final_norm_eps is not None:
            return self.final_norm_eps
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

    @property
    def num_earlier_tokens(self) -> int:
        """The number of tokens before each that the embedding or layers read."""
        if self.averaged_ngrams is not None:
            return self.averaged_ngrams.longest - 1
        return self.num_layer_tokens - 1

    @property
    def num_layer_tokens(self) -> int:
        """The number of tokens in the input of a layer that reads tokens. With taps, states keep the earlier ones."""
        return 1 if self.ngrams is None or self.ngrams.taps else self.ngrams.longest

    @property
    def embedding_width(self) -> int:
        """The number of elements of a token's embedding."""
        return self.embedding_size or self.hidden_size

    def for_layer(self, layer: LayerSpec) -> "ModelSpec":
        """Return the spec with the sizes of one layer instead of the model's."""
        return replace(
            self,
            num_heads=layer.num_heads or self.num_heads,
            head_dim=layer.head_dim or self.head_dim,
            num_kv_heads=layer.num_kv_heads or self.num_kv_heads,
            attention_scale=layer.attention_scale or self.attention_scale,
            attention_output_bias=layer.has_output_bias or self.attention_output_bias,
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
            num_parts += -(-self.index_dim // (layer.head_dim or self.head_dim))
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
        inputs += self.hidden_size * (first_layer <= self.last_embedding_layer)
        digits = NUM_TOKEN_DIGITS * self.num_layer_tokens
        inputs += digits * (first_layer <= self.last_token_layer)
        if any(layer.restart for layer in self.layers[first_layer:]):
            inputs += self.num_kept_states * self.hidden_size
        inputs += self.passed_width(first_layer)
        return (self.num_streams or 1) * self.hidden_size + inputs

    def passed_width(self, first_layer: int) -> int:
        """Return the number of elements that layers before `first_layer` pass on to it and later ones."""
        passed = passed_size(layer.experts for layer in self.layers[first_layer:])
        if 0 < first_layer < len(self.layers):
            hyper = self.hyper_connections
            # The bytes of a float32 number for each stream.
            passed += 4 * self.num_streams * (hyper is not None and hyper.delayed)
            passed += self.hidden_size * self.shares_values
        return passed

    @property
    def shares_values(self) -> bool:
        """True if the values of the first layer are interpolated with those of the others (RWKV-7)."""
        return any(isinstance(layer.recurrent, Rwkv7) for layer in self.layers)

    @property
    def num_kept_states(self) -> int:
        """The number of hidden states of a token that layers keep for others."""
        restarts = [layer.restart for layer in self.layers if layer.restart is not None]
        return max((1 + each.keeps for each in restarts if each.keeps is not None), default=0)

    @property
    def num_streams(self) -> int:
        """The number of hidden states of a token; 0 for one that is a residual stream."""
        kinds = (self.altup, self.hyper_connections, self.attention_residuals)
        return next((x.num_streams for x in (*kinds, self.predicted_stream) if x is not None), 0)

    @property
    def last_embedding_layer(self) -> int:
        """The index of the last layer that reads the tokens' embeddings, or -1. Layers up to it get them."""
        if self.adds_embeddings:
            return len(self.layers) - 1
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
