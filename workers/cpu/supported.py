"""Determine whether native programs support a model."""

from __future__ import annotations

from ...protocol.checkpoint.recurrent_layers import Rwkv6, Rwkv7
from ...protocol.checkpoint.state_spaces.jet import JetBlock
from ...protocol.checkpoint.state_spaces.rwkv4 import Rwkv4
from ...protocol.checkpoint.state_spaces.xlstm import MatrixLstm
from ..layers.spec import ModelSpec
from ..layers.window import AfterPrompt
from .library import NotSupportedNatively


def check_supported(spec: ModelSpec) -> None:
    """Raise `NotSupportedNatively` if native programs lack an operation that the model needs."""
    if features := unsupported_features(spec):
        raise NotSupportedNatively(f"the native CPU backend does not support {features[0]}")


def unsupported_features(spec: ModelSpec) -> list[str]:
    """Return the features of the model for which native programs have no operation."""
    source = None if spec.source is None else spec.source.encoder
    features = {
        "attention to the first token beside windows": (
            source is not None and source.reads_first_token
        ),
        "attention to sums of blocks of tokens": (
            source is not None and source.summed_block_size > 0
        ),
        "global tokens beside blocks of tokens": source is not None
        and source.num_global_tokens > 0,
        "states that predict the next token": spec.predicted_stream is not None,
        "experts that compute a limited number of tokens": source is not None
        and any(layer.experts is not None and layer.experts.capacity for layer in source.layers),
        "blocks of keys that depend on heads": any(layer.block_pattern for layer in spec.layers),
        "clamped MLPs without a gate": not spec.has_gate and spec.activation == "clamped_swiglu",
        "clamped MLPs with another limit": spec.activation == "clamped_swiglu"
        and any(layer.gate_limit for layer in spec.layers),
        "gates beside other rows of a matrix": spec.alternates_gates,
        "compressed attention whose head_dim is not a multiple of 16, or whose index_head_dim is odd": (
            spec.compressed is not None
            and (spec.head_dim % 16 != 0 or spec.compressed.indexer.head_dim % 2 != 0)
        ),
        "entries of compressed attention that layers share": any(
            layer.compression is not None and layer.compression.derives_index_keys
            for layer in spec.layers
        ),
        "hyper-connections with the factors of the block before": (
            spec.hyper_connections is not None and spec.hyper_connections.delayed
        ),
        "canvases that a pass changes by what it predicts": spec.self_conditioning_size > 0,
        "layers that also attend to the keys of earlier ones": spec.loop_window > 0,
        "attention to images beside attention to tokens": (
            spec.source is not None
            and spec.source.are_images
            and any(layer.reads_source and layer.attends for layer in spec.layers)
        ),
        "factors of queries and values for each token": spec.has_token_scales,
        "bottlenecks of layers": spec.bottleneck is not None,
        "layer norms within attention and MLPs": spec.has_inner_norms and spec.norm_kind == "layer",
        "embeddings of n-grams of tokens": spec.num_earlier_tokens > 0,
        "rotations by sums of sines and cosines": any(
            layer.rope is not None and layer.rope.fourier is not None for layer in spec.layers
        ),
        "experts of which each group gives some": any(
            layer.experts is not None and layer.experts.divides_choice for layer in spec.layers
        ),
        "experts that layers share": any(
            layer.experts is not None and layer.experts.bank is not None for layer in spec.layers
        ),
        "factors of blocks' outputs": spec.has_output_factors,
        "biases of keys": spec.has_key_biases,
        "differential attention": any(layer.difference is not None for layer in spec.layers),
        "convolutions beside attention": spec.num_span_taps > 0,
        "convolutions of a layer's input": any(layer.input_convolution for layer in spec.layers),
        "attention that compares tokens with distances": spec.disentangled is not None,
        "experts that the tokens of a block share": any(
            layer.experts is not None and layer.experts.block_size for layer in spec.layers
        ),
        "experts that pairs of keys choose": spec.pair_experts is not None,
        "experts that project queries": spec.num_attention_experts > 0,
        "embeddings of another size than hidden states": spec.embedding_size is not None,
        "hyper-connections of low rank beside another activation than SiLU": (
            spec.hyper_connections is not None
            and spec.hyper_connections.rank > 0
            and spec.activation != "silu"
        ),
        "means of index keys whose number of elements is not a multiple of 4": (
            spec.block_indexer is not None
            and spec.block_indexer.num_heads > 0
            and spec.block_indexer.head_dim % 4 != 0
        ),
        "weighted index queries of heads (Step 5)": (
            spec.block_indexer is not None and spec.block_indexer.heads_per_group > 0
        ),
        "dropped tokens beside a table of positions": (
            spec.dropped_token is not None and spec.num_positions > 0
        ),
        "layer norms of heads beside other norms": spec.qk_norm_bias and spec.norm_kind == "rms",
        "gates of norms of latent vectors": spec.norm_gate is not None
        and spec.norm_gate.has_latent_gates,
        "norms of keys alone": spec.qk_norm == "only keys",
        "windows of output tokens alone (Unlimited-OCR)": any(
            isinstance(layer.window, AfterPrompt) for layer in spec.layers
        ),
        "convolutions of neighbors": any(layer.neighbors for layer in spec.layers),
        "sinks with keys": spec.num_sink_keys > 0,
        "norms that replace the residual stream": any(x.replaces_stream for x in spec.layers),
        "queries of low rank without latent attention": spec.query_rank > 0,
        "LSTMs with matrices (xLSTM)": any(
            isinstance(layer.recurrent, MatrixLstm) for layer in spec.layers
        ),
        "convolutions of values with taps of each token (Jet-Nemotron)": any(
            isinstance(layer.recurrent, JetBlock) for layer in spec.layers
        ),
        "mixtures of two tokens' hidden states (RWKV)": any(
            isinstance(layer.recurrent, Rwkv4 | Rwkv6 | Rwkv7) for layer in spec.layers
        ),
        "gated MLPs with xIELU": spec.has_gate and spec.activation == "xielu",
    }
    return [feature for feature, is_used in features.items() if is_used]
