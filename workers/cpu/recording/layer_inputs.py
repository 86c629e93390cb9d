"""Record the per-layer inputs that some models have in addition to the hidden states."""

from __future__ import annotations

from ...device.dtypes import rounded
from ...layers.specs.altup import PerLayerInputsSpec
from ..library import NotSupportedNatively
from ..packing import GROUP_SIZE, ActivationKind
from .blocks import BLOCK, INPUTS, PART, BlockRecorder


class LayerInputsRecorder:
    """Records the inputs of all layers, and the last block of each layer, which reads the layer's own input."""

    def __init__(self, blocks: BlockRecorder, inputs: PerLayerInputsSpec) -> None:
        self._blocks = blocks
        self._inputs = inputs

    def record(self) -> None:
        """Record the computation of all layers' inputs from the embedding, which is in the residual stream."""
        blocks, spec, inputs = self._blocks, self._blocks.spec, self._inputs
        weights, program = blocks.weights, blocks.program
        size = len(spec.layers) * inputs.size
        if inputs.vocab_size:
            self._record_table(size)
        projection = weights.packed("per_layer_model_projection.weight", size, spec.hidden_size)
        kind = blocks.quantize("", None, [projection])
        blocks.add_product(kind, [projection])
        program.add_op(
            "add_inputs",
            num_columns=inputs.size,
            scale=spec.hidden_size**-0.5,
            vectors=[blocks.norm("per_layer_projection_norm", inputs.size)],
            num_stored=bool(inputs.vocab_size),
        )

    def _record_table(self, size: int) -> None:
        """Record the rows of the table, of which each has `size` elements."""
        blocks, inputs = self._blocks, self._inputs
        part = blocks.part(inputs.vocab_size)
        # If a later rank has the row of this one, no token is in this part.
        is_shared = not blocks.shard.tensor_parallel.own(inputs.vocab_size)
        table = blocks.weights.packed(
            "embed_tokens_per_layer.weight", inputs.vocab_size, size, part
        )
        blocks.program.add_op(
            "embed_inputs",
            parts=[table],
            first_column=inputs.vocab_size if is_shared else part.start,
            num_columns=inputs.vocab_size,
            # Round the scale as it was rounded when the model was trained.
            scale=rounded(inputs.size**0.5, blocks.weights.any_dtype),
            target=INPUTS if blocks.is_alone else PART,
        )
        if not blocks.is_alone:
            blocks.add_sum(INPUTS, size=size)

    def record_block(self, index: int, prefix: str) -> None:
        """Record the last block of a layer: a product gates the layer's input, and another product follows.

        Every rank has these matrices.

        Args:
            index: The index of the layer in this shard.
            prefix: The prefix of the layer's tensors.
        """
        blocks, size = self._blocks, self._inputs.size
        hidden, program = blocks.spec.hidden_size, blocks.program
        gate, project = (
            blocks.weights.packed(f"{prefix}{name}.weight", rows, columns)
            for name, rows, columns in (
                ("per_layer_input_gate", size, hidden),
                ("per_layer_projection", hidden, size),
            )
        )
        kind = project.activation_kind
        if kind == ActivationKind.INT8 and size % GROUP_SIZE:
            raise NotSupportedNatively(
                f"{size} elements of a layer's input are not a multiple of the group size {GROUP_SIZE}"
            )
        blocks.add_product(blocks.quantize(prefix, None, [gate]), [gate])
        program.add_op(
            "gate_by_inputs", activation_kind=kind, first_column=index * size, num_columns=size
        )
        blocks.add_product(kind, [project], source=1, target=BLOCK)
