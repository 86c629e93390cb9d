"""Record the products that every kind of block has in common, from and to the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ...layers.activations import normal_quantile
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ...layers.specs.experts import GateLimit
from ...models.layer_kinds.residual_gate import ResidualGate, ResidualScale
from ...models.weights import Rows
from ..abi import structs
from ..abi.structs import MAX_PARTS
from ..experts import native_limit
from ..library import NotSupportedNatively
from ..packing import ActivationKind, PackedWeight
from ..program import Floats, NativeProgram
from ..weights import NativeWeightReader, intermediate_shares

QKV, RESIDUAL, BLOCK, PART, ROUTER, INPUTS, ACTIVATIONS, ADDED, SHORTCUT = range(9)
"""The values of a product's target; see `Op` in csrc/model/model.h."""


class MLP(msgspec.Struct, frozen=True):
    """The matrices of an MLP, which may be gated."""

    gate_up: list[PackedWeight]
    biases: list[Floats | None]
    down: PackedWeight
    down_bias: Floats | None


class BlockRecorder:
    """Records products that read the residual stream, and the end of a block, together with their weights."""

    def __init__(
        self,
        program: NativeProgram,
        spec: ModelSpec,
        shard: ModelShard,
        weights: NativeWeightReader,
    ) -> None:
        self.program = program
        self.spec = spec
        self.shard = shard
        self.weights = weights
        self.is_alone = shard.tensor_parallel.size == 1
        self._norm_gates: dict[str, structs.NormGate] = {}

    def add_product(
        self,
        kind: ActivationKind,
        parts: Sequence[PackedWeight],
        biases: Sequence[Floats | None] = (),
        *,
        source: int = 0,
        target: int = QKV,
        **fields: Any,
    ) -> None:
        """Record products of the activations `source`, in the format `kind`. Their results are concatenated."""
        self.program.add_op(
            "linear",
            input_kind=kind,
            source=source,
            target=target,
            parts=parts,
            vectors=biases,
            **fields,
        )

    def add_projection(
        self,
        prefix: str,
        norm: str | None,
        parts: Sequence[PackedWeight],
        biases: Sequence[Floats | None],
        kind: ActivationKind | None = None,
        first_column: int = 0,
        input_size: int = 0,
        input_op: str = "quantize",
    ) -> ActivationKind:
        """Record products of the normed residual stream, with concatenated results. Return the last input format.

        Args:
            prefix: The prefix of the layer's tensors.
            norm: The name of the norm, or None.
            parts: The matrices.
            biases: Their biases.
            kind: The format in which the stream is already quantized, and must stay; None if it is not quantized.
            first_column: The column of the projection at which the results begin.
            input_size: If not 0, the products read a separate input of this size instead of the residual stream.
            input_op: The operation that quantizes the stream; it may add something to it.
        """
        start = 0
        while start < len(parts):
            stop = start + 1
            needed = parts[start].activation_kind.for_whole_rows
            while (
                stop < min(len(parts), start + MAX_PARTS)
                and parts[stop].activation_kind.for_whole_rows == needed
            ):
                stop += 1
            if kind != needed:
                kind = self.quantize(prefix, norm, needed, input_size, input_op)
            self.add_product(kind, parts[start:stop], biases[start:stop], first_column=first_column)
            first_column += sum(part.n for part in parts[start:stop])
            start = stop
        assert kind is not None
        return kind

    def add_second_product(
        self,
        columns: range,
        weight: PackedWeight,
        first_column: int,
        norm: Floats | None = None,
        eps: float = 0.0,
        target: int = QKV,
    ) -> None:
        """Record the product of `columns` of the projection, after an optional norm, with a second matrix.

        The result replaces the columns from `first_column` on, in the projection or, if given, in `target`.
        """
        kind = weight.activation_kind.for_whole_rows
        self.program.add_op(
            "quantize_columns",
            activation_kind=kind,
            first_column=columns.start,
            num_columns=len(columns),
            vectors=[norm],
            eps=eps,
        )
        self.add_product(kind, [weight], target=target, first_column=first_column)

    def read_mlp(self, prefix: str, size: int) -> MLP:
        """Return this rank's part of an MLP of `size` intermediate elements."""
        spec = self.spec
        shares = intermediate_shares(size, self.shard.tensor_parallel)
        names = ["gate_proj", "up_proj"] if spec.has_gate else ["up_proj"]
        gate_up, biases = self._projections(
            prefix,
            names,
            [size] * len(names),
            [shares[self.shard.tensor_parallel.rank]] * len(names),
            spec.mlp_bias,
        )
        down = self.output_projection(f"{prefix}down_proj.weight", size, shares)
        bias = None
        if spec.mlp_bias or spec.mlp_output_bias:
            bias = self.weights.vector(f"{prefix}down_proj.bias", spec.hidden_size)
        return MLP(gate_up, biases, down, bias)

    def add_gated(
        self,
        mlp: MLP,
        input_kind: ActivationKind,
        xielu: Floats | None = None,
        limit: GateLimit | None = None,
    ) -> None:
        """Record the computation of an MLP's intermediate elements.

        `xielu` has the parameters of that activation, if used, and `limit` a limit of the gates.
        """
        self.program.add_op(
            "gated_linear",
            input_kind=input_kind,
            activation_kind=ActivationKind.F32
            if self.spec.has_inner_norms
            else mlp.down.activation_kind,
            parts=mlp.gate_up,
            vectors=[*mlp.biases, *[None] * (2 - len(mlp.biases)), xielu],
            scale=self.spec.gate_multiplier,
            gate_limit=native_limit(limit),
        )

    def add_inner_norm(self, name: str, size: int, part: range, output: PackedWeight) -> None:
        """Record the norm of the activations that a block's last product `output` reads.

        This rank has `part` of `size` activations.
        """
        weights = self.norm(name, size)[part.start : part.stop]
        if not self.is_alone:
            self.program.add_op("share_activation_squares", num_columns=len(part))
        self.program.add_op(
            "norm_activations",
            activation_kind=output.activation_kind,
            target=QKV if self.is_alone else PART,
            num_columns=len(part),
            vectors=[weights],
            scale=1 / size,
        )

    def add_sparse_gated(
        self, mlp: MLP, input_kind: ActivationKind, sparsity: float, size: int
    ) -> None:
        """Record the intermediate elements of a gated MLP in which a threshold sets most gates to 0.

        Args:
            mlp: The MLP.
            input_kind: The format of its input.
            sparsity: The fraction of a normal distribution that lies below the threshold.
            size: The number of intermediate elements of all ranks.
        """
        self.add_product(input_kind, mlp.gate_up, mlp.biases)
        num_columns = mlp.gate_up[0].n
        if not self.is_alone:
            self.program.add_op("share_gates", num_columns=num_columns)
        self.program.add_op(
            "sparse_gates",
            activation_kind=mlp.down.activation_kind,
            target=QKV if self.is_alone else PART,
            num_columns=num_columns,
            vectors=[np.array([normal_quantile(sparsity), size], np.float32)],
        )

    def quantize(
        self,
        prefix: str,
        norm: str | None,
        inputs: list[PackedWeight] | ActivationKind,
        input_size: int = 0,
        input_op: str = "quantize",
        second_norm: Floats | None = None,
    ) -> ActivationKind:
        """Record the quantization of the residual stream, after an optional norm, for `inputs`. Return its format.

        If `input_size` is not 0, a separate input of this size is quantized instead, without a norm. `second_norm` has
        the weights of a layer norm after the first norm, then its biases.
        """
        kind = (
            inputs
            if isinstance(inputs, ActivationKind)
            else inputs[0].activation_kind.for_whole_rows
        )
        if input_size:
            self.program.add_op("quantize_inputs", activation_kind=kind, num_columns=input_size)
            return kind
        if norm is None:
            self.program.add_op(input_op, activation_kind=kind, vectors=[None, None, second_norm])
            return kind
        name = f"{prefix}{norm}"
        if self.spec.interpolates_blocks:
            eps = self.spec.hidden_norm_eps(name)
            self.program.add_op("norm", vectors=self.hidden_norm(name), eps=eps)
            self.program.add_op(input_op, activation_kind=kind, vectors=[None, None, second_norm])
            return kind
        self.program.add_op(
            input_op,
            activation_kind=kind,
            vectors=[*self.hidden_norm(name), second_norm],
            norm_gate=self._norm_gate(name),
            eps=self.spec.hidden_norm_eps(name),
        )
        return kind

    def add_block(
        self,
        prefix: str,
        output: PackedWeight,
        bias: Floats | None,
        norm: str | None,
        multiplier: float,
        source: int = 1,
        target: int | None = None,
    ) -> None:
        """Record the addition of a block's output projection, after an optional norm, to the residual stream.

        `source` has the activations that the projection reads. If `target` is given, the output is written there
        instead.
        """
        # A norm of the output cancels the multiplier, except for the epsilon. No family has both.
        assert norm is None or self.spec.norms_stream or multiplier == 1.0
        scale = self.spec.residual_multiplier * multiplier
        self.add_product(
            output.activation_kind,
            [output],
            [bias if self.is_alone else None],
            source=source,
            target=self.target_of(norm, target),
            scale=scale,
        )
        self.finish_block(prefix, bias, norm, scale, target)

    def add_read_block(self, gate: str, output: PackedWeight) -> None:
        """Record the end of a block that only tokens with a source have. A stored gate multiplies its output."""
        scale = self.spec.residual_multiplier * float(np.tanh(self.weights.vector(gate, 1)[0]))
        self.add_product(
            output.activation_kind, [output], source=1, target=BLOCK if self.is_alone else PART
        )
        if not self.is_alone:
            self.add_sum(BLOCK)
        self.program.add_op("norm_add", scale=scale, reads_source=True)

    def target_of(self, norm: str | None, target: int | None = None) -> int:
        """Return the buffer to which a block's last product is written, given the name of the norm that follows it.

        It is the residual stream, the block's output if that is normed, or this rank's part of a sum.
        """
        return self._sum_target(norm, target) if self.is_alone else PART

    def _sum_target(self, norm: str | None, target: int | None) -> int:
        if target is not None:
            return target
        return RESIDUAL if norm is None or self.spec.norms_stream else BLOCK

    def add_sum(
        self,
        target: int,
        bias: Floats | None = None,
        scale: float = 1.0,
        size: int | None = None,
        first_column: int = 0,
    ) -> None:
        """Record the sum of the ranks' partial results of `size` elements; by default the hidden size.

        In the projection, it is written from `first_column` on.
        """
        self.program.add_op(
            "sum",
            target=target,
            vectors=[bias],
            scale=scale,
            first_column=first_column,
            num_columns=self.spec.hidden_size if size is None else size,
        )

    def finish_block(
        self,
        prefix: str,
        bias: Floats | None,
        norm: str | None,
        scale: float,
        target: int | None = None,
    ) -> None:
        """Record the end of a block: the sum over the ranks, if there are several, and the optional norm."""
        if not self.is_alone:
            target = self._sum_target(norm, target)
            self.add_sum(target, bias, scale)
        if norm is not None:
            self.add_normed(f"{prefix}{norm}", scale)

    def add_normed(self, name: str, scale: float) -> None:
        """Record the norm of a block's output, called `name`, and its addition to the residual stream."""
        spec, vectors = self.spec, self.hidden_norm(name)
        eps = spec.hidden_norm_eps(name)
        if spec.norms_stream:
            return self.program.add_op("norm", vectors=vectors, eps=eps)
        if not spec.residual_temperature:
            return self.program.add_op("norm_add", vectors=vectors, scale=scale, eps=eps)
        gate = ResidualGate(spec, self.weights, name)
        factor, weight = gate.block_D.numpy(), vectors[0]
        assert weight is not None
        scaled = [factor, weight] if spec.scales_input(name) else [factor * weight, None]
        return self.program.add_op(
            "gated_norm_add", vectors=[*scaled, gate.stream_D.numpy()], eps=eps
        )

    def add_normed_sum(self, name: str) -> None:
        """Record the addition of the norm called `name` of stream and block to the stream."""
        vectors, eps = self.hidden_norm(name), self.spec.hidden_norm_eps(name)
        self.program.add_op("norm_add", scale=1.0)
        self.program.add_op("add_normed", vectors=vectors, eps=eps)
        self.program.add_op("norm_add", scale=-1.0)

    def add_scaled(self, name: str) -> None:
        """Record the addition of a block's output to the stream, both times the factors called `name`."""
        scale = ResidualScale(self.spec, self.weights, name)
        factor, block_factor = scale.stream_D.numpy(), scale.block_D.numpy()
        bias = scale.stream_bias_D.numpy() * factor + scale.block_bias_D.numpy() * block_factor
        self.program.add_op("scale_add", vectors=[factor, block_factor, bias])

    def hidden_norm(self, name: str) -> list[Floats | None]:
        """Return the weight and the bias of a norm over the hidden size."""
        spec = self.spec
        bias_D = None
        if spec.norm_kind == "layer" and spec.has_norm_bias(name):
            bias_D = self.weights.vector(f"{name}.bias", spec.hidden_size)
        return [self.norm(name, spec.hidden_size), bias_D]

    def plain_norm(self, name: str) -> tuple[list[Floats | None], float]:
        """Return the weight and the bias of a norm over the hidden size, and its epsilon.

        Raises:
            NotSupportedNatively: The norm has a gate.
        """
        if self.spec.norm_gate is not None and self.spec.norm_gate.applies(name):
            raise NotSupportedNatively(
                "the native CPU backend does not support experts that return their input, after a norm with a gate"
            )
        return self.hidden_norm(name), self.spec.hidden_norm_eps(name)

    def _norm_gate(self, name: str) -> structs.NormGate | None:
        """Return the gate of a norm of the hidden size, or None if it has none."""
        gate = self.spec.norm_gate
        if gate is None or not gate.applies(name):
            return None
        if name not in self._norm_gates:
            size = self.spec.hidden_size
            down = self.weights.read_float32(f"{name}.gate.down.weight", gate.rank, size)
            up = self.weights.read_float32(f"{name}.gate.up.weight", size, gate.rank)
            self._norm_gates[name] = structs.NormGate(gate.rank, down.numpy(), up.numpy().T)
        return self._norm_gates[name]

    def norm(self, name: str, size: int) -> Floats:
        """Return the weight of a norm over `size` elements, with the model's offset added."""
        offset = self.spec.norm_offset(name)
        if offset is None:
            return np.ones(size, np.float32)
        return self.weights.vector(f"{name}.weight", size) + np.float32(offset)

    def part(self, count: int) -> range:
        """Return this rank's part of `count` rows."""
        return self.shard.tensor_parallel.part(count)

    def output_projection(
        self, name: str, inputs: int, shares: Sequence[range | Sequence[range]]
    ) -> PackedWeight:
        """Return the last matrix of a block. Each rank has its columns in `shares`, one range or several."""
        rank = self.shard.tensor_parallel.rank
        return self.weights.packed_columns(name, self.spec.hidden_size, inputs, shares, rank)

    def _projections(
        self, prefix: str, names: list[str], sizes: list[int], parts: list[range], has_bias: bool
    ) -> tuple[list[PackedWeight], list[Floats | None]]:
        """Return this rank's rows of matrices that read the residual stream, and their biases."""
        return self.packed_rows(self.weights.rows(prefix, names, sizes, parts), has_bias)

    def packed_rows(
        self, rows: list[Rows], has_bias: bool, input_size: int = 0
    ) -> tuple[list[PackedWeight], list[Floats | None]]:
        """Return matrices that read the residual stream, or an input of `input_size` elements, and their biases."""
        reader = self.weights
        weights = reader.packed_together(rows, input_size or self.spec.hidden_size)
        biases: list[Floats | None] = [None] * len(rows)
        if has_bias:
            biases = [
                each.select_array(
                    reader.vector(f"{each.name}.bias", *each.biases).repeat(each.rows_per_bias)
                )
                if each.has_bias
                else None
                for each in rows
            ]
        return weights, biases
