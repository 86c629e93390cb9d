"""The native library's structs for `ctypes`, with the fields that the library describes."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

from .description import enum_names, native_struct

MAX_PARTS = 3
ACTIVATIONS = enum_names("Activation")


def activation_number(name: str) -> int:
    """Return the native number of an activation. Operations with xIELU have its parameters and need no number."""
    return 0 if name == "xielu" else ACTIVATIONS.index(name)


class ArrayStruct(ctypes.Structure):
    """A struct whose pointers may be set to arrays, which it keeps alive.

    It copies those that are not contiguous, and also keeps the arrays of structs that become parts of it.
    """

    def __init__(self, *values: Any, **fields: Any) -> None:
        self._kept: list[Any] = []
        super().__init__(
            *map(self._address, values),
            **{name: self._address(value) for name, value in fields.items()},
        )

    def _address(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            self._kept.append(np.ascontiguousarray(value))
            return self._kept[-1].ctypes.data
        if isinstance(value, ArrayStruct):
            self._kept.append(value)
        return value


@native_struct()
class PackedWeight(ctypes.Structure):
    """A packed matrix; see `csrc/linear/linear.h`. `packing.PackedWeight` extends it."""


@native_struct()
class LatentShape(ctypes.Structure):
    """The sizes of latent attention in a layer; see `csrc/model/model.h`."""

    @property
    def query_offset(self) -> int:
        """The column of the queries, or of the vector from which they are computed, in a token's projection."""
        return int(self.key_dim + self.index_dim + self.index_inputs)

    @property
    def index_offset(self) -> int:
        """The column of the weights of the indexer's heads."""
        queries = max(self.query_inputs, self.num_heads * (self.plain_dim + self.rotary_dim))
        return int(self.query_offset + queries + self.num_heads * self.key_dim)

    @property
    def gate_offset(self) -> int:
        """The column of the gates."""
        return int(self.index_offset + self.index_heads * (1 + self.index_dim))

    @property
    def size(self) -> int:
        """The number of columns."""
        return int(self.gate_offset + self.num_heads * self.gate_dim)


@native_struct()
class ModelShape(ctypes.Structure):
    """The sizes of one rank's part of a model; see `csrc/model/model.h`."""


@native_struct()
class AttentionLayer(ctypes.Structure):
    """A layer's attention parameters; see `csrc/attention/attention.h`."""


@native_struct()
class Router(ArrayStruct):
    """The parameters by which a token's experts are chosen; see `csrc/experts/router.h`."""


@native_struct()
class GateLimit(ctypes.Structure):
    """A limit of the numbers in a gated product; see `csrc/model/model.h`."""


_EXCHANGE = CFUNCTYPE(c_void_p, c_void_p, c_int64, c_void_p, c_void_p)


@native_struct(begin_round=CFUNCTYPE(c_int32), dispatch=_EXCHANGE, collect=_EXCHANGE)
class ExpertExchange(ctypes.Structure):
    """Callbacks that exchange rows with other ranks; see `csrc/model/expert_exchange.h`."""


@native_struct(
    router=Router,
    gate_limit=GateLimit,
    gate=POINTER(PackedWeight),
    up=POINTER(PackedWeight),
    down=POINTER(PackedWeight),
)
class ExpertLayer(ArrayStruct):
    """A layer's mixture of experts; see `csrc/model/model.h`."""


@native_struct()
class Mixer(ArrayStruct):
    """The parameters of a recurrent layer; see `csrc/model/model.h`."""


@native_struct()
class LowRankFactor(ctypes.Structure):
    """The second factor of a LoRA adapter; see `csrc/rows/kernels.h`."""


@native_struct(up=LowRankFactor * MAX_PARTS)
class Adapter(ctypes.Structure):
    """The change that a LoRA adapter makes to a product; see `csrc/model/model.h`."""


@native_struct()
class AltUp(ArrayStruct):
    """The weights of alternating updates in a layer; see `csrc/model/model.h`."""


@native_struct()
class HyperConnection(ArrayStruct):
    """The connection of a block to the streams of a token; see `csrc/model/model.h`."""


@native_struct()
class NgramTable(ArrayStruct):
    """The embeddings of n-grams in a layer; see `csrc/model/model.h`."""


@native_struct()
class NormGate(ArrayStruct):
    """The gate of a norm; see `csrc/model/model.h`."""


@native_struct()
class RelativeBiases(ArrayStruct):
    """The biases of scores that depend on the query; see `csrc/model/model.h`."""


@native_struct()
class ChoiceRule(ctypes.Structure):
    """The keys that an indexer chooses; see `csrc/model/model.h`."""


@native_struct()
class Compression(ArrayStruct):
    """The entries of compressed attention in a layer; see `csrc/model/model.h`."""


@native_struct(gate_limit=GateLimit, choice=ChoiceRule, attention=AttentionLayer)
class Op(ctypes.Structure):
    """One operation of a program; see `csrc/model/model.h`."""


@native_struct()
class StepGroup(ctypes.Structure):
    """The block table and the slots of one KV-cache group in a step."""


@native_struct()
class ChainedSampler(ctypes.Structure):
    """A sampler with its parameters; see `csrc/sampling/sampler_chain.h`."""


@native_struct(samplers=POINTER(ChainedSampler))
class LogitRules(ctypes.Structure):
    """The changes to the logits of a slot's request; see `csrc/sampling/logit_rules.h`."""


@native_struct()
class LogprobRows(ctypes.Structure):
    """The arrays that log-probabilities are written to; see `csrc/sampling/token_chooser.h`."""


@native_struct(rules=POINTER(LogitRules), logprobs=POINTER(LogprobRows))
class SamplingRows(ctypes.Structure):
    """Sampling parameters by slot, and the rows to sample; see `csrc/sampling/token_chooser.h`."""


@native_struct(
    groups=POINTER(StepGroup), kv_caches=POINTER(c_void_p), sampling=POINTER(SamplingRows)
)
class Step(ctypes.Structure):
    """The arrays of one step; see `csrc/model/step.h`."""


@native_struct()
class Suffixes(ctypes.Structure):
    """The earlier passages from which drafts are copied; see `csrc/sampling/suffixes.h`."""


@native_struct(suffixes=POINTER(Suffixes))
class DraftLookup(ctypes.Structure):
    """The drafts of every slot, and the drafts found last; see `csrc/sampling/draft_lookup.h`."""


@native_struct(
    block_tables=POINTER(c_void_p),
    kv_caches=POINTER(c_void_p),
    sampling=POINTER(SamplingRows),
    lookup=POINTER(DraftLookup),
)
class DecodeBatch(ctypes.Structure):
    """A batch in which every request decodes; see `csrc/model/step.h`."""
