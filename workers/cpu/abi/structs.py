"""The native library's structs for `ctypes`.

Every struct mirrors one in `csrc` and is listed in `STRUCTS` and in `csrc/abi.cpp`. The library is compared with these
mirrors when it is loaded.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_float, c_int32, c_int64, c_void_p

from .latent_structs import LatentShape
from .sampling_structs import DraftLookup, LogitRules, LogprobRows, SamplingRows, Suffixes
from .stream_structs import AltUp, HyperConnection, NgramTable

MAX_PARTS = 3
ACTIVATIONS = (
    "silu",
    "gelu_tanh",
    "clamped_swiglu",
    "relu2",
    "sigmoid",
    "gelu",
    "relu",
    "softplus",
    "quick_gelu",
    "clipped_gelu",
    "mish",
    "tanh",
    "relu6",
    "leaky_relu",
    "hardswish",
    "laplace",
    "linear",
)


def activation_number(name: str) -> int:
    """Return the native number of an activation. Operations with xIELU have its parameters and need no number."""
    return 0 if name == "xielu" else ACTIVATIONS.index(name)


class PackedWeight(ctypes.Structure):
    """A packed matrix; see `csrc/linear/linear.h`. `packing.PackedWeight` extends it."""

    _fields_ = (
        ("format", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("group", c_int32),
        ("scale", c_float),
        ("_data", c_void_p),
    )


class ModelShape(ctypes.Structure):
    """The sizes of one rank's part of a model; see `csrc/model/model.h`."""

    _fields_ = (
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab_size", c_int32),
        ("block_size", c_int32),
        ("block_bytes", c_int64),
        ("kv_format", c_int32),
        ("activation", c_int32),
        ("output_gate", c_int32),
        ("gate_cap", c_float),
        ("up_cap", c_float),
        ("norm", c_int32),
        ("norm_groups", c_int32),
        ("is_bidirectional", c_int32),
        ("keeps_block", c_int32),
        ("router_size", c_int32),
        ("projection_size", c_int32),
        ("mixed_size", c_int32),
        ("num_streams", c_int32),
        ("input_size", c_int32),
        ("is_latent", c_int32),
        ("index_dim", c_int32),
        ("index_inputs", c_int32),
        ("index_eps", c_float),
        ("is_compressed", c_int32),
        ("num_threads", c_int32),
    )


class AttentionLayer(ctypes.Structure):
    """A layer's attention parameters; see `csrc/attention/attention.h`."""

    _fields_ = (
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("rounds_alibi", c_int32),
    )


class Router(ctypes.Structure):
    """The parameters by which a token's experts are chosen; see `csrc/experts/router.h`."""

    _fields_ = (
        ("num_experts", c_int32),
        ("num_chosen", c_int32),
        ("num_identities", c_int32),
        ("skips_identities", c_int32),
        ("num_always", c_int32),
        ("scoring", c_int32),
        ("renormalizes", c_int32),
        ("num_groups", c_int32),
        ("num_chosen_groups", c_int32),
        ("num_best", c_int32),
        ("corrects_logits", c_int32),
        ("scale", c_float),
        ("mixer_noise", c_float),
        ("softcap", c_float),
        ("correction", c_void_p),
        ("scales", c_void_p),
        ("experts_by_token", c_void_p),
        ("num_second_tokens", c_int32),
        ("second_tokens", c_void_p),
    )


class GateLimit(ctypes.Structure):
    """A limit of the numbers in a gated product; see `csrc/model/model.h`."""

    _fields_ = (("bound", c_float), ("is_activated", c_int32))


class ExpertExchange(ctypes.Structure):
    """Callbacks that exchange rows with other ranks; see `csrc/model/expert_exchange.h`."""

    _fields_ = (
        ("num_ranks", c_int32),
        ("begin_round", CFUNCTYPE(c_int32)),
        ("dispatch", CFUNCTYPE(c_void_p, c_void_p, c_int64, c_void_p, c_void_p)),
        ("collect", CFUNCTYPE(c_void_p, c_void_p, c_int64, c_void_p, c_void_p)),
    )


class ExpertLayer(ctypes.Structure):
    """A layer's mixture of experts; see `csrc/model/model.h`."""

    _fields_ = (
        ("router", Router),
        ("size", c_int32),
        ("first", c_int32),
        ("count", c_int32),
        ("adds_block", c_int32),
        ("has_shared_gate", c_int32),
        ("scales_inputs", c_int32),
        ("gate_limit", GateLimit),
        ("gate", POINTER(PackedWeight)),
        ("up", POINTER(PackedWeight)),
        ("down", POINTER(PackedWeight)),
        ("gate_biases", c_void_p),
        ("up_biases", c_void_p),
        ("down_biases", c_void_p),
        ("gated_adapters", c_void_p),
        ("output_adapters", c_void_p),
    )


class Mixer(ctypes.Structure):
    """The parameters of a recurrent layer; see `csrc/model/model.h`."""

    _fields_ = (
        ("kind", c_int32),
        ("channels", c_int32),
        ("num_convolved", c_int32),
        ("kernel", c_int32),
        ("segment", c_int32),
        ("num_taps", c_int32),
        ("distance", c_int32),
        ("state_offset", c_int32),
        ("num_heads", c_int32),
        ("num_groups", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("step_rank", c_int32),
        ("norm_groups", c_int32),
        ("gates_before_norm", c_int32),
        ("has_tiled_heads", c_int32),
        ("gate_activation", c_int32),
        ("min_step", c_float),
        ("max_step", c_float),
        ("strength", c_float),
        ("lowest_log_decay", c_float),
        ("taps", c_void_p),
        ("bias", c_void_p),
        ("multipliers", c_void_p),
        ("decay", c_void_p),
        ("skip", c_void_p),
        ("step_bias", c_void_p),
        ("norm", c_void_p),
        ("gates", c_void_p),
        ("gate_biases", c_void_p),
    )


class LowRankFactor(ctypes.Structure):
    """The second factor of a LoRA adapter; see `csrc/rows/kernels.h`."""

    _fields_ = (
        ("data", c_void_p),
        ("rank", c_int32),
        ("format", c_int32),
        ("bias", c_void_p),
    )


class Adapter(ctypes.Structure):
    """The change that a LoRA adapter makes to a product; see `csrc/model/model.h`."""

    _fields_ = (
        ("down", c_void_p),
        ("whole", c_void_p),
        ("up", LowRankFactor * MAX_PARTS),
    )


class NormGate(ctypes.Structure):
    """The gate of a norm; see `csrc/model/model.h`."""

    _fields_ = (("rank", c_int32), ("down", c_void_p), ("up", c_void_p))


class RelativeBiases(ctypes.Structure):
    """The biases of scores that depend on the query; see `csrc/model/model.h`."""

    _fields_ = (
        ("first_column", c_int32),
        ("rank", c_int32),
        ("num_distances", c_int32),
        ("first_sink", c_int32),
        ("bound", c_float),
        ("head_bound", c_float),
        ("scales", c_void_p),
        ("table", c_void_p),
    )


class ChoiceRule(ctypes.Structure):
    """The keys that an indexer chooses; see `csrc/model/model.h`."""

    _fields_ = (
        ("num_chosen", c_int32),
        ("block_size", c_int32),
        ("num_local", c_int32),
        ("has_groups", c_int32),
        ("num_queries", c_int32),
    )


class Compression(ctypes.Structure):
    """The entries of compressed attention in a layer; see `csrc/model/model.h`."""

    _fields_ = (
        ("rate", c_int32),
        ("overlaps", c_int32),
        ("layer", c_int32),
        ("group", c_int32),
        ("index_dim", c_int32),
        ("index_heads", c_int32),
        ("biases", c_void_p),
        ("norm", c_void_p),
        ("index_biases", c_void_p),
        ("index_norm", c_void_p),
    )


class Op(ctypes.Structure):
    """One operation of a program; see `csrc/model/model.h`."""

    _fields_ = (
        ("kind", c_int32),
        ("input_kind", c_int32),
        ("activation_kind", c_int32),
        ("source", c_int32),
        ("target", c_int32),
        ("layer", c_int32),
        ("group", c_int32),
        ("rope", c_int32),
        ("qk_norm", c_int32),
        ("rotates_before_norm", c_int32),
        ("is_optional", c_int32),
        ("reads_source", c_int32),
        ("is_sparse", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("output_dim", c_int32),
        ("num_stored", c_int32),
        ("norms_values", c_int32),
        ("num_parts", c_int32),
        ("first_column", c_int32),
        ("num_columns", c_int32),
        ("adapter_rank", c_int32),
        ("scale", c_float),
        ("eps", c_float),
        ("activation", c_int32),
        ("gate_limit", GateLimit),
        ("choice", ChoiceRule),
        ("attention", AttentionLayer),
        ("parts", c_void_p * MAX_PARTS),
        ("vectors", c_void_p * MAX_PARTS),
        ("experts", c_void_p),
        ("mixer", c_void_p),
        ("heads", c_void_p),
        ("adapters", c_void_p),
        ("altup", c_void_p),
        ("hyper", c_void_p),
        ("norm_gate", c_void_p),
        ("compression", c_void_p),
        ("latent", c_void_p),
        ("ngrams", c_void_p),
        ("relative_biases", c_void_p),
    )


class StepGroup(ctypes.Structure):
    """The block table and the slots of one KV-cache group in a step."""

    _fields_ = (
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("slot_mapping", c_void_p),
    )


class Step(ctypes.Structure):
    """The arrays of one step; see `csrc/model/step.h`."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_logit_rows", c_int32),
        ("wants_all_hidden", c_int32),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("query_start_loc", c_void_p),
        ("table_rows", c_void_p),
        ("groups", POINTER(StepGroup)),
        ("kv_caches", POINTER(c_void_p)),
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("tokens", c_void_p),
        ("sampling", POINTER(SamplingRows)),
        ("adapters", c_void_p),
        ("placed", c_void_p),
        ("encoded", c_void_p),
        ("encoded_stride", c_int64),
        ("rotary", c_void_p),
        ("visible", c_void_p),
        ("spans_need_windows", c_int32),
        ("source_lens", c_void_p),
        ("source_queries", c_void_p),
    )


class DecodeBatch(ctypes.Structure):
    """A batch in which every request decodes; see `csrc/model/step.h`."""

    _fields_ = (
        ("num_slots", c_int32),
        ("num_groups", c_int32),
        ("chooses_later", c_int32),
        ("slots", c_void_p),
        ("max_model_len", c_int64),
        ("token_ids", c_void_p),
        ("num_tokens", c_void_p),
        ("num_computed_tokens", c_void_p),
        ("block_tables", POINTER(c_void_p)),
        ("block_table_strides", c_void_p),
        ("kv_caches", POINTER(c_void_p)),
        ("sampling", POINTER(SamplingRows)),
        ("num_drafts", c_void_p),
        ("lookup", POINTER(DraftLookup)),
        ("tokens", c_void_p),
        ("num_sampled", c_void_p),
        ("num_verified", c_void_p),
        ("adapters", c_void_p),
        ("rotary_offsets", c_void_p),
        ("source_lens", c_void_p),
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
    )


STRUCTS = (
    PackedWeight,
    LatentShape,
    ModelShape,
    AttentionLayer,
    Router,
    GateLimit,
    ExpertExchange,
    ExpertLayer,
    Mixer,
    LowRankFactor,
    Adapter,
    AltUp,
    HyperConnection,
    NgramTable,
    NormGate,
    RelativeBiases,
    ChoiceRule,
    Compression,
    Op,
    StepGroup,
    LogitRules,
    LogprobRows,
    SamplingRows,
    Step,
    Suffixes,
    DraftLookup,
    DecodeBatch,
)
