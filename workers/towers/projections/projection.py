"""The projection of a vision tower's features to the hidden size of the decoder.

Shapes: P patches, D hidden size of the tower, M merged rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.checkpoint.vision.tiled.minicpm import HEAD_SIZE
from ...loaders import Checkpoint
from ..image_tower import TowerSource
from ..weights import Linear, Norm, VisionWeights, attend, find_activation
from .connector import read_connector
from .gated_squares import read_gated_squares
from .merging import completed_squares, means, side_by_side, waves
from .mobile import read_convolved_mlp, read_pooled_mlp
from .perceiver import read_perceiver
from .query_former import read_former
from .window_queries import read_window_queries

Projection: TypeAlias = Callable[[Tensor, int], Tensor]
"""Maps features [P, D] to embeddings [M, output size], given the number of patches per row, with margins."""

_MATRIX: Final = "connector.modality_projection.proj"
_MLP: Final = "multi_modal_projector."
WORDS: Final = "visual_embeddings_table.weight"
"""The name of the table of visual words."""


def read_projection(spec: VisionSpec, source: TowerSource) -> Projection:
    """Return the projection that `spec.projection` names."""

    def read(marker: str) -> VisionWeights:
        return source.weights(marker, spec.tensor_names)

    return _KINDS[spec.projection](spec, source.checkpoint, read)


_Reader: TypeAlias = Callable[[str], VisionWeights]
"""Maps the name of a tensor to the weights that have the same prefix."""


def _matrix(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights = read(f"{_MATRIX}.weight")
    product = weights.read_linear(
        _MATRIX, spec.output_size, _merged_size(spec), has_bias=spec.projection_bias
    )
    return lambda x_PD, num_columns: product(side_by_side(x_PD, num_columns, spec.merge_factor))


def _normed_matrix(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    product = _matrix(spec, checkpoint, read)
    name = "connector.modality_projection.norm"
    norm = read(f"{name}.weight").read_layer_norm(name, spec.output_size, spec.projection_eps)
    return lambda x_PD, num_columns: norm(product(x_PD, num_columns))


def _mlp(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights = read(f"{_MLP}linear_1.weight")
    norm = _norm_of_squares(spec, weights)
    mlp = _two_products(spec, checkpoint, weights, _merged_size(spec))
    return lambda x_PD, num_columns: mlp(norm(side_by_side(x_PD, num_columns, spec.merge_factor)))


def _mlp_mean(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights, factor = read(f"{_MLP}linear_1.weight"), spec.merge_factor
    mlp = _two_products(spec, checkpoint, weights, spec.hidden_size)

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        x_PD = mlp(x_PD)
        if factor == 1:
            return x_PD
        rows_DRC = x_PD.unflatten(0, (-1, num_columns)).movedim(-1, 0)
        size = rows_DRC.shape[1] // factor, num_columns // factor
        return F.adaptive_avg_pool2d(rows_DRC, size).flatten(1).T

    return project


def _padded_mlp(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    mlp = _two_products(spec, checkpoint, read(f"{_MLP}linear_1.weight"), _merged_size(spec))

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        merged = completed_squares(x_PD, num_columns, spec.merge_factor)
        return mlp(merged.transpose(1, 2).flatten(1))

    return project


def _normed_squares(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights, columns, inner = read(f"{_MLP}linear_1.weight"), _merged_size(spec), spec.adapter_size
    activation = find_activation(checkpoint, spec.projection_activation)
    norm = weights.read_layer_norm(f"{_MLP}layer_norm", columns, spec.projection_eps)
    first = weights.read_linear(f"{_MLP}linear_0", inner, columns)
    middle_norm = weights.read_layer_norm(f"{_MLP}middle_norm", inner, spec.projection_eps)
    mlp = _two_products(replace(spec, adapter_size=0), checkpoint, weights, inner)

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        x_MD = completed_squares(x_PD, num_columns, spec.merge_factor).flatten(1)
        return mlp(middle_norm(activation(first(norm(x_MD)))))

    return project


def _joined(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights, size = read(f"{_MLP}linear_1.weight"), spec.output_size
    assert spec.fine is not None
    fine = weights.read_linear(f"{_MLP}fine", size // 2, spec.fine.output_size)
    first = weights.read_linear(f"{_MLP}linear_1", size // 2, spec.hidden_size)
    second = weights.read_linear(f"{_MLP}linear_2", size, size)

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        x, fine_x = x_PD.split((spec.hidden_size, x_PD.shape[1] - spec.hidden_size), 1)
        return second(F.gelu(torch.cat((fine(fine_x), first(x)), 1)))

    return project


def _gated_mlp(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights, inner = read(f"{_MLP}linear_1.weight"), spec.adapter_size
    norm = _norm_of_squares(spec, weights)
    first = weights.read_linear(f"{_MLP}linear_1", 2 * inner, _merged_size(spec))
    second = weights.read_linear(f"{_MLP}linear_2", spec.output_size, inner)

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        up, gate = first(norm(side_by_side(x_PD, num_columns, spec.merge_factor))).chunk(2, -1)
        return second(F.silu(gate) * up)

    return project


def _norm_of_squares(spec: VisionSpec, weights: VisionWeights) -> Callable[[Tensor], Tensor]:
    """Return the norm of the merged rows, or the identity if there is none."""
    if not spec.has_projection_norm:
        return lambda x: x
    return weights.read_layer_norm(f"{_MLP}layer_norm", _merged_size(spec), spec.projection_eps)


def _merged_mlp(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights = read(f"{_MLP}linear_1.weight")
    size, factor = spec.hidden_size * len(spec.feature_layers), spec.merge_factor
    norm = weights.read_rms_norm(f"{_MLP}norm", size, spec.projection_eps)
    # The columns of the matrix are stored by element first, then by patch.
    merge = weights.read(f"{_MLP}patch_merger.merging_layer.weight", size, size * factor**2)
    merge = merge.unflatten(1, (size, factor**2)).transpose(1, 2).flatten(1).contiguous()
    mlp = _two_products(spec, checkpoint, weights, size)
    return lambda x_PD, num_columns: mlp(
        F.linear(side_by_side(norm(x_PD), num_columns, factor), merge)
    )


def _mean(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    name = f"{_MLP}mm_input_projection_weight"
    weights = read(name)
    weight = weights.read(name, spec.hidden_size, spec.output_size).t().contiguous()
    norm = weights.read_rms_norm(
        f"{_MLP}mm_soft_emb_norm", spec.hidden_size, spec.projection_eps, offset=1.0
    )
    return lambda x_PD, num_columns: F.linear(
        norm(means(x_PD, num_columns, spec.merge_factor)), weight
    )


def _queries(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights, size = read(f"{_MLP}query"), spec.hidden_size
    query_D = weights.read(f"{_MLP}query", max(count for _, count in spec.query_counts), size)
    activation = find_activation(checkpoint, spec.projection_activation)
    attention = f"{_MLP}cross_attn."

    def product(name: str, rows: int, columns: int) -> Linear:
        return weights.read_linear(f"{_MLP}{name}", rows, columns, has_bias=False)

    def norm(name: str) -> Norm:
        return weights.read_layer_norm(f"{_MLP}{name}", size, spec.projection_eps)

    to_q, to_k, to_v = weights.read_joined(f"{attention}multihead_attn.", size)
    # The queries are the same for all images.
    q_QD = to_q(product("cross_attn.q_proj", size, size)(norm("cross_attn.layer_norm")(query_D)))
    norm_patches = norm("cross_attn.layer_norm_kv")
    first_k, first_v = (product(f"cross_attn.{name}_proj", size, size) for name in "kv")
    first_output = weights.read_linear(f"{attention}multihead_attn.out_proj", size, size)
    second_output = weights.read_linear(f"{attention}linear", size, size)
    last_norm, output = norm("layer_norm"), spec.output_size
    up = product("feed_forward.linear_in", output, size)
    down = product("feed_forward.linear_out", output, output)
    counts = dict(spec.query_counts)

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        normed, queries = norm_patches(x_PD), q_QD[: counts[num_columns]]
        attended = attend(queries, to_k(first_k(normed)), to_v(first_v(normed)), spec.num_heads)
        x_QD = second_output(first_output(attended))
        return down(activation(up(last_norm(x_QD))))

    return project


def _resampler(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights, size, count = read("resampler.query"), spec.output_size, spec.max_outputs
    name, num_heads = "resampler.", size // HEAD_SIZE

    def norm(each: str) -> Norm:
        return weights.read_layer_norm(f"{name}ln_{each}", size, spec.projection_eps)

    to_q, to_k, to_v = weights.read_joined(f"{name}attn.", size)
    # The queries are the same for all images.
    q_QD = to_q(norm("q")(weights.read(f"{name}query", count, size)))
    first = (
        weights.read_linear(f"{name}kv_proj", size, spec.hidden_size, has_bias=False)
        if spec.hidden_size != size
        else None
    )
    norm_patches, last_norm = norm("kv"), norm("post")
    output = weights.read_linear(f"{name}attn.out_proj", size, size)
    # GGUF files have the usual suffix.
    last = f"{name}proj.weight"
    last_DD = weights.read(last if last in weights else f"{name}proj", size, size)

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        x_PD = norm_patches(x_PD if first is None else first(x_PD))
        places_PD = waves(len(x_PD) // num_columns, num_columns, size).to(x_PD)
        attended = attend(q_QD, to_k(x_PD + places_PD), to_v(x_PD), num_heads)
        return last_norm(output(attended)) @ last_DD

    return project


def _latents(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights, size = read("latent_query"), spec.output_size
    queries_QD = weights.read("latent_query", spec.num_queries, size)
    dense = weights.read_linear("dense", size, spec.hidden_size)
    query, key, value, output = (
        weights.read_linear(f"x_attn.{name}_proj", size, size) for name in ("q", "k", "v", "out")
    )
    # The queries are the same for all images.
    q_QD = query(queries_QD)

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        rows_LD = torch.cat((dense(F.normalize(x_PD, dim=-1)), queries_QD))
        attended = attend(q_QD, key(rows_LD), value(rows_LD), spec.num_query_heads)
        return output(attended) * spec.output_scale

    return project


def _class(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    product = read(f"{_MATRIX}.weight").read_linear(
        _MATRIX, spec.output_size, spec.hidden_size, has_bias=spec.projection_bias
    )
    return lambda x_PD, num_columns: product(x_PD[:1])


def _probe(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights, size = read("head.probe"), spec.hidden_size
    to_q, to_k, to_v = weights.read_joined("head.attention.", size)
    # The query is the same for all images.
    q_1D = to_q(weights.read("head.probe", 1, 1, size)[0])
    output = weights.read_linear("head.attention.out_proj", size, size)
    norm = weights.read_layer_norm("head.layernorm", size, spec.norm_eps)
    up = weights.read_linear("head.mlp.fc1", spec.intermediate_size, size)
    down = weights.read_linear("head.mlp.fc2", size, spec.intermediate_size)
    activation = find_activation(checkpoint, spec.projection_activation)

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        x_1D = output(attend(q_1D, to_k(x_PD), to_v(x_PD), spec.num_heads))
        return x_1D + down(activation(up(norm(x_1D))))

    return project


def _no_product(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    return lambda x_PD, num_columns: means(x_PD, num_columns, spec.merge_factor)


def _rows_of_squares(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    return lambda x_PD, num_columns: side_by_side(x_PD, num_columns, spec.merge_factor)


def _adapter(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    weights, size = read(f"{_MLP}fc1.weight"), spec.adapter_size
    activation = find_activation(checkpoint, spec.projection_activation)
    first = weights.read_linear(f"{_MLP}fc1", size, _merged_size(spec), has_bias=False)
    second = weights.read_linear(f"{_MLP}fc2", size, size, has_bias=False)
    last = weights.read_linear(f"{_MLP}linear_1", spec.output_size, size, has_bias=False)
    return lambda x_PD, num_columns: last(
        activation(second(activation(first(side_by_side(x_PD, num_columns, spec.merge_factor)))))
    )


def _standardized_mean(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    size = spec.hidden_size
    product = read(f"{_MATRIX}.weight").read_linear(_MATRIX, spec.output_size, size, has_bias=False)
    mean_and_factor: list[Tensor] = []
    if spec.standardizes:
        weights = read("std_bias")
        mean_and_factor = [weights.read(name, size).float() for name in ("std_bias", "std_scale")]

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        # The scaled means may exceed the range of float16.
        x_MD = means(x_PD, num_columns, spec.merge_factor).float() * size**0.5
        if mean_and_factor:
            x_MD = (x_MD - mean_and_factor[0]) * mean_and_factor[1]
        return product(F.rms_norm(x_MD.to(x_PD.dtype), (size,), None, spec.projection_eps))

    return project


def _words(spec: VisionSpec, checkpoint: Checkpoint, read: _Reader) -> Projection:
    num_words = spec.num_words - spec.num_marks
    weights = read("head_linear.weight")
    product = weights.read_linear("head_linear", num_words, _merged_size(spec), has_bias=False)
    norm = weights.read_layer_norm("head_norm", num_words, spec.projection_eps)
    table_WD = read(WORDS).read(WORDS, spec.num_words, spec.output_size)[:num_words]

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        logits_MW = norm(product(side_by_side(x_PD, num_columns, spec.merge_factor)))
        if spec.chooses_words:
            return table_WD[logits_MW.argmax(-1)]
        return logits_MW.softmax(-1) @ table_WD

    return project


def _two_products(
    spec: VisionSpec, checkpoint: Checkpoint, weights: VisionWeights, columns: int
) -> Callable[[Tensor], Tensor]:
    size, has_bias = spec.output_size, spec.projection_bias
    inner = spec.adapter_size or size
    first = weights.read_linear(f"{_MLP}linear_1", inner, columns, has_bias=has_bias)
    second = weights.read_linear(f"{_MLP}linear_2", size, inner, has_bias=has_bias)
    activation = find_activation(checkpoint, spec.projection_activation)
    return lambda x: second(activation(first(x)))


def _merged_size(spec: VisionSpec) -> int:
    return spec.hidden_size * len(spec.feature_layers) * spec.merge_factor**2


_KINDS: Final[dict[str, Callable[[VisionSpec, Checkpoint, _Reader], Projection]]] = {
    "none": lambda spec, checkpoint, read: lambda x_PD, num_columns: x_PD,
    "matrix": _matrix,
    "normed matrix": _normed_matrix,
    "adapter": _adapter,
    "queries": _queries,
    "resampler": _resampler,
    "class": _class,
    "probe": _probe,
    "mlp": _mlp,
    "mlp mean": _mlp_mean,
    "convolved mlp": read_convolved_mlp,
    "padded mlp": _padded_mlp,
    "normed squares": _normed_squares,
    "pooled mlp": read_pooled_mlp,
    "joined": _joined,
    "gated mlp": _gated_mlp,
    "gated squares": read_gated_squares,
    "merged mlp": _merged_mlp,
    "mean": _mean,
    "squares": _rows_of_squares,
    "means": _no_product,
    "standardized mean": _standardized_mean,
    "connector": read_connector,
    "windows": read_window_queries,
    "former": read_former,
    "latents": _latents,
    "perceiver": read_perceiver,
    "words": _words,
}
