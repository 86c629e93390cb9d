"""Record the recurrent part of a layer in a native program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....protocol.checkpoint.recurrent_layers import MixerLayer, ShortConvolution
from ...layers.layer_spec import LayerSpec
from ...layers.rope import RopeSpec
from ...layers.specs.norm_names import NormNames
from ..mixers import ColumnProduct, NativeMixer
from ..packing import ActivationKind
from .blocks import PART, QKV, BlockRecorder


def record_mixer(
    blocks: BlockRecorder,
    index: int,
    prefix: str,
    layer: LayerSpec,
    recurrent: MixerLayer,
    norms: NormNames,
    ropes: Mapping[RopeSpec, int],
    input_op: str = "quantize",
) -> ActivationKind:
    """Record a recurrent part. `index` is the index of its states' cache. Return the format of its quantized input.

    `ropes` has the numbers of rotary embeddings, and `input_op` is the operation that quantizes its input.
    """
    spec, program = blocks.spec, blocks.program
    own_prefix = f"{prefix}mixer."
    mixer = NativeMixer(spec, recurrent, blocks.weights, own_prefix, blocks.shard)
    rows, tensor_parallel = mixer.rows, blocks.shard.tensor_parallel
    projection = [blocks.packed_rows([each], rows.has_projection_bias) for each in mixer.projection]
    output = blocks.output_projection(
        f"{own_prefix}out_proj.weight", rows.num_columns, rows.runs(tensor_parallel)
    )
    bias = None
    if rows.has_output_bias:
        bias = blocks.weights.vector(f"{own_prefix}out_proj.bias", spec.hidden_size)
    parts = [weight for weights, _ in projection for weight in weights]
    biases = [bias for _, biases in projection for bias in biases]
    first = len(parts) - (mixer.last_column > 0)
    input_norm = norms.attention_input
    kind = blocks.add_projection(
        prefix, input_norm, parts[:first], biases[:first], input_op=input_op
    )
    if mixer.last_column:
        kind = blocks.add_projection(
            prefix, input_norm, parts[first:], biases[first:], kind, mixer.last_column
        )
    for product in mixer.second_products:
        _add_product(blocks, mixer, product)
    for heads in mixer.rotated_heads:
        assert layer.rope is not None
        program.add_op(
            "rotate_heads",
            rope=ropes[layer.rope],
            first_column=heads.columns.start,
            num_heads=len(heads.columns) // heads.size,
            head_dim=heads.size,
            vectors=[heads.norm],
            scale=heads.scale,
            eps=mixer.norm_eps,
        )
    state: dict[str, Any] = {"layer": index, "group": layer.state_group, "mixer": mixer}
    if isinstance(recurrent, ShortConvolution):
        program.add_op("short_convolution", activation_kind=output.activation_kind, **state)
    else:
        program.add_op("convolve", **state)
        for product in mixer.convolved_products:
            _add_product(blocks, mixer, product)
        for columns, norm in mixer.normed_columns:
            program.add_op(
                "norm_columns",
                first_column=columns.start,
                num_columns=len(columns),
                vectors=[norm],
                eps=mixer.column_eps,
            )
        program.add_op("scan", **state)
        if mixer.shares_norm:
            program.add_op("share_squares", mixer=mixer)
        program.add_op(
            "gate_mixed",
            activation_kind=output.activation_kind,
            target=PART if mixer.shares_norm else QKV,
            mixer=mixer,
            eps=mixer.norm_eps,
        )
    blocks.add_block(prefix, output, bias, norms.attention_output, spec.recurrent_multiplier)
    return kind


def _add_product(blocks: BlockRecorder, mixer: NativeMixer, product: ColumnProduct) -> None:
    """Record a product of columns of the projection, and the sum over the ranks, if each has a part of it."""
    blocks.add_second_product(
        product.columns,
        product.weight,
        0 if product.is_partial else product.first_column,
        product.norm,
        mixer.column_eps,
        PART if product.is_partial else QKV,
    )
    if product.is_partial:
        blocks.add_sum(QKV, size=product.weight.n, first_column=product.first_column)
