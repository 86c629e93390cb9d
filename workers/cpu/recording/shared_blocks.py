"""Record the uses of transformer blocks whose weights several layers share; see `SharedBlock`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace
from torch.nn import functional as F

from ...layers.layer_spec import LayerSpec
from ...layers.shared_block import SharedBlock
from ...models.attention import qkv_rows
from ...models.shared_blocks.block import read_low_rank, skip_other_stages
from ...models.weights import Rows
from ..library import NotSupportedNatively
from ..packing import ActivationKind, PackedWeight, common_kind
from ..program import Floats
from ..weights import intermediate_shares
from .attention import AttentionMatrices, AttentionRecorder
from .blocks import ADDED, BLOCK, MLP, QKV, BlockRecorder
from .model_shape import padded_rank


class _Block(msgspec.Struct, frozen=True):
    """The matrices of a shared block, which several layers use."""

    attention: AttentionMatrices
    mlp: MLP


class SharedBlockRecorder:
    """Records shared blocks. All uses of a block in a program refer to the same matrices."""

    def __init__(self, blocks: BlockRecorder, attention: AttentionRecorder) -> None:
        self._blocks, self._attention = blocks, attention
        self._program, self._spec = blocks.program, blocks.spec
        self._shard, self._weights = blocks.shard, blocks.weights
        self._read: dict[int, _Block] = {}

    def record(self, index: int, prefix: str, layer: LayerSpec, use: SharedBlock) -> None:
        """Record the block of a layer and its projection, whose output is not added to the residual stream.

        `index` is the index of the attention's KV cache, and `prefix` that of the layer's own tensors.
        """
        spec, blocks, program = self._spec.for_layer(layer), self._blocks, self._program
        size = spec.hidden_size
        of_block = f"layers.{use.source}.shared_block."
        layer = replace(layer, input_size=2 * size)
        if use.source not in self._read:
            attention = self._attention.read(of_block, layer)
            mlp = blocks.read_mlp(f"{of_block}mlp.", spec.intermediate_size)
            self._read[use.source] = _Block(attention, mlp)
            skip_other_stages(spec, self._weights, of_block, self._shard)
        block = self._read[use.source]
        matrices, mlp = block.attention, block.mlp
        kind = common_kind(of_block.rstrip("."), matrices.inputs).for_whole_rows
        norm = blocks.norm(f"{of_block}input_layernorm", 2 * size)
        program.add_op("join_inputs", activation_kind=kind, vectors=[norm])
        rows = None
        if use.rank and use.adapts_attention:
            rows = qkv_rows(spec, layer, self._weights, f"{of_block}self_attn.", self._shard)
        self._add_product(matrices.inputs, matrices.biases, kind, use, rows, 2 * size)
        self._attention.attend(index, of_block, layer, matrices, None, QKV)
        kind = common_kind(of_block.rstrip("."), mlp.gate_up).for_whole_rows
        norm = blocks.norm(f"{of_block}pre_ff_layernorm", size)
        self._quantize_output(kind, norm)
        rows = self._mlp_rows(f"{of_block}mlp.", spec.intermediate_size) if use.rank else None
        self._add_product(mlp.gate_up, mlp.biases, kind, use, rows, size)
        program.add_op(
            "sparse_gates",
            activation_kind=mlp.down.activation_kind,
            num_columns=mlp.gate_up[0].n,
        )
        blocks.add_block(of_block, mlp.down, mlp.down_bias, None, spec.mlp_multiplier, target=QKV)
        own = self._weights.packed(f"{prefix}linear.weight", size, size)
        kind = own.activation_kind.for_whole_rows
        self._quantize_output(kind, None)
        blocks.add_product(kind, [own], target=BLOCK)

    def _mlp_rows(self, prefix: str, size: int) -> list[Rows]:
        """Return this rank's rows of the first matrices of an MLP of `size` intermediate elements."""
        ranks = self._shard.tensor_parallel
        part = intermediate_shares(size, ranks)[ranks.rank]
        return self._weights.rows(prefix, ["gate_proj", "up_proj"], [size] * 2, [part] * 2)

    def _quantize_output(self, kind: ActivationKind, norm: Floats | None) -> None:
        """Record the quantization of a block's output, which is in the projection."""
        size = self._spec.hidden_size
        self._program.add_op(
            "quantize_columns", activation_kind=kind, num_columns=size, vectors=[norm]
        )

    def _add_product(
        self,
        parts: Sequence[PackedWeight],
        biases: Sequence[Floats | None],
        kind: ActivationKind,
        use: SharedBlock,
        rows: Sequence[Rows] | None,
        num_inputs: int,
    ) -> None:
        """Record a shared product, and the layer's own addition to it if there are `rows`."""
        self._blocks.add_product(kind, parts, biases)
        if rows is None:
            return
        down, up = read_low_rank(self._weights, use, rows, num_inputs)
        padding = padded_rank(len(down)) - len(down)
        name = rows[0].name
        packed_down = self._weights.pack_tensor(name, F.pad(down, (0, 0, 0, padding)))
        packed_up = self._weights.pack_tensor(name, F.pad(up, (0, padding)))
        if packed_down.activation_kind.for_whole_rows != kind:
            raise NotSupportedNatively(
                "the native CPU backend does not support shared blocks whose low-rank products have another "
                "weight format"
            )
        first = sum(part.n for part in parts)
        self._blocks.add_product(kind, [packed_down], first_column=first)
        columns = range(first, first + packed_down.n)
        self._blocks.add_second_product(columns, packed_up, 0, target=ADDED)
