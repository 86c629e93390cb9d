"""The projections of squares of patches to the decoder's hidden size.

Shapes: P patches of an image, D hidden size of the tower, C cells. A cell is a square of patches that becomes one
output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.grid import GridVisionSpec
from ....protocol.checkpoint.vision.spec import PageSpec
from ...loaders import Checkpoint
from ..layers import limited
from ..weights import Linear, VisionWeights, activation, find_activation

_PAGE_EPS = 1e-6
_GLM_NORM_EPS = 1e-5
_OUTPUT_NORM_EPS = 1e-5
_NUM_MARKS = 4


def read_merger(
    spec: GridVisionSpec, tensors: VisionWeights, checkpoint: Checkpoint
) -> Callable[[Tensor, int], Tensor]:
    """Return the function that projects the last layer's patches [P, D] to cells [C, output size].

    Its second argument is the number of cells per row.
    """
    if spec.merger_size:
        return _GatedMerger(spec, tensors, checkpoint)
    if spec.projects_patches:
        return _PatchMerger(spec, tensors)
    if spec.newlines == "framed":
        return _FramedMerger(spec, tensors, checkpoint)
    if spec.newlines == "plain":
        return _NewlineMerger(spec, tensors, checkpoint)
    if spec.page is not None:
        return _PageMerger(spec, spec.page, tensors)
    if spec.has_third_matrix:
        return _ElementMerger(spec, tensors)
    if spec.num_words:
        return _WordsMerger(spec, tensors)
    if spec.convolves:
        return _ConvolvedMerger(spec, tensors)
    if spec.merges_frames:
        return _FramesMerger(spec, tensors)
    return Merger(spec, tensors, "merger.", norm=spec.merger_norm)


class Merger:
    """Projects the patches of each cell, which may first be normed one by one or together."""

    def __init__(
        self,
        spec: GridVisionSpec,
        tensors: VisionWeights,
        prefix: str,
        *,
        norm: Literal["patches", "squares"] | None,
    ) -> None:
        self._size = spec.hidden_size * spec.merge_size**2
        self._norms_squares = norm == "squares"
        self._norm: Callable[[Tensor], Tensor] = lambda x: x
        if norm is not None:
            size = self._size if self._norms_squares else spec.hidden_size
            eps = spec.merger_eps or spec.norm_eps
            kind = spec.merger_norm_kind or spec.norm_kind
            if spec.has_merger_norm_bias:
                self._norm = tensors.read_norm(f"{prefix}norm", size, kind, eps)
            else:
                self._norm = tensors.read_layer_norm(f"{prefix}norm", size, eps, has_bias=False)
        self._activation = activation(spec.merger_activation)
        inner, has_bias = spec.merger_inner or self._size, spec.has_merger_biases
        self._first = tensors.read_linear(f"{prefix}fc1", inner, self._size, has_bias=has_bias)
        last = spec.middle_size or spec.output_size
        self._second = tensors.read_linear(f"{prefix}fc2", last, inner, has_bias=has_bias)
        self._third: Callable[[Tensor], Tensor] = lambda x: x
        if spec.middle_size:
            self._third = tensors.read_linear(f"{prefix}fc3", spec.output_size, last)
        if spec.has_output_norm:
            self._third = tensors.read_layer_norm(f"{prefix}output_norm", last, _OUTPUT_NORM_EPS)

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        """Return the projected cells [C, output size]."""
        if self._norms_squares:
            x = self._norm(x_PD.reshape(-1, self._size))
        else:
            x = self._norm(x_PD).reshape(-1, self._size)
        return self._third(self._second(self._activation(self._first(x))))


class SummedMergers:
    """Projects the patches of several layers, and projects the activated sum again."""

    def __init__(self, spec: GridVisionSpec, tensors: VisionWeights) -> None:
        own = replace(spec, output_size=spec.middle_size, middle_size=0)
        self._mergers = [
            Merger(own, tensors, f"summed_mergers.{i}.", norm=spec.merger_norm)
            for i in range(len(spec.summed_layers))
        ]
        self._project = tensors.read_linear("summed_project", spec.output_size, spec.middle_size)

    def __call__(self, layers: Sequence[Tensor], num_columns: int) -> Tensor:
        """Return the projected cells [C, output size] of the layers' patches [P, D]."""
        parts = [merge(x, num_columns) for merge, x in zip(self._mergers, layers, strict=True)]
        return self._project(F.silu(torch.stack(parts).sum(0)))


class _GatedMerger:
    """Projects the normed patches of each cell by a matrix, then by another matrix, a norm and a gated MLP."""

    def __init__(
        self, spec: GridVisionSpec, tensors: VisionWeights, checkpoint: Checkpoint
    ) -> None:
        size, side, output = spec.hidden_size, spec.merge_size, spec.output_size
        self._activation = find_activation(checkpoint, spec.activation)
        self._limit = spec.gate_limit
        self._norm = tensors.read_norm("merger.norm", size, spec.norm_kind, spec.norm_eps)
        self._square = _read_square(tensors, output, size, side)

        def read(name: str, rows: int, columns: int) -> Linear:
            return tensors.read_linear(f"merger.{name}", rows, columns, has_bias=False)

        self._second = read("proj", output, output)
        self._second_norm = tensors.read_layer_norm(
            "merger.post_projection_norm", output, _GLM_NORM_EPS
        )
        self._gate, self._up = (
            read(f"{name}_proj", spec.merger_size, output) for name in ("gate", "up")
        )
        self._down = read("down_proj", output, spec.merger_size)

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        x = self._square(self._norm(x_PD).reshape(-1, self._square.weight.shape[1]))
        x = F.gelu(self._second_norm(self._second(x)))
        gate_PF, up_PF = self._gate(x), self._up(x)
        if self._limit:
            gate_PF, up_PF = limited(gate_PF, up_PF, self._limit)
        return self._down(self._activation(gate_PF) * up_PF)


class _PatchMerger:
    """Projects each patch by two matrices, and then the patches of each cell by two more."""

    def __init__(self, spec: GridVisionSpec, tensors: VisionWeights) -> None:
        inner, output = spec.merger_inner, spec.output_size
        self._joined = output * spec.merge_size**2
        sizes = ((inner, spec.hidden_size), (output, inner), (inner, self._joined), (output, inner))
        self._linears = [
            tensors.read_linear(f"merger.fc{i}", *shape) for i, shape in enumerate(sizes, 1)
        ]

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        first, second, third, fourth = self._linears
        x = second(F.gelu(first(x_PD))).reshape(-1, self._joined)
        return fourth(F.gelu(third(x)))


class _ElementMerger:
    """Projects the patches of each cell by three matrices, of which the first reads one element after another."""

    def __init__(self, spec: GridVisionSpec, tensors: VisionWeights) -> None:
        num_patches, inner = spec.merge_size**2, spec.merger_inner
        self._size = spec.hidden_size * num_patches
        first = tensors.read("merger.fc1.weight", inner, self._size)
        by_patch = first.unflatten(1, (spec.hidden_size, num_patches)).transpose(1, 2)
        self._first = Linear(by_patch.flatten(1).contiguous(), None)
        self._second = tensors.read_linear("merger.fc2", inner, inner, has_bias=False)
        self._third = tensors.read_linear("merger.fc3", spec.output_size, inner, has_bias=False)

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        x = F.gelu(self._second(F.gelu(self._first(x_PD.reshape(-1, self._size)))))
        return self._third(x)


class _WordsMerger:
    """Makes of each cell a distribution over visual words."""

    def __init__(self, spec: GridVisionSpec, tensors: VisionWeights) -> None:
        self._size = spec.hidden_size * spec.merge_size**2
        table_WD = tensors.read("merger.table.weight", spec.num_words, spec.output_size)
        self._words_WD = table_WD[:-_NUM_MARKS]
        count = len(self._words_WD)
        self._product = tensors.read_linear("merger.words", count, self._size, has_bias=False)
        self._norm = tensors.read_layer_norm("merger.norm", count, spec.merger_eps)

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        parts_CW = self._norm(self._product(x_PD.reshape(-1, self._size))).softmax(-1)
        return parts_CW @ self._words_WD


def read_marks(spec: GridVisionSpec, tensors: VisionWeights) -> Tensor:
    """Return the embeddings of the marks around images and videos, [4, output size].

    They stand before an image, after an image, before a video and after a video, in this order.
    """
    table_WD = tensors.read("merger.table.weight", spec.num_words, spec.output_size)
    return table_WD[-_NUM_MARKS:].clone()


class _ConvolvedMerger:
    """Convolves the patches of an image twice, which halves its sides, and projects what remains by a matrix."""

    def __init__(self, spec: GridVisionSpec, tensors: VisionWeights) -> None:
        size = spec.hidden_size
        first = (spec.convolved_size, 2) if spec.convolved_size else (2 * size, 3)
        sizes = (1, size, *first), (2, first[0], 2 * first[0], 3)
        self._convolutions = [
            (
                tensors.read(f"merger.conv{i}.weight", outputs, inputs, side, side),
                tensors.read(f"merger.conv{i}.bias", outputs),
            )
            for i, inputs, outputs, side in sizes
        ]
        self._project = tensors.read_linear(
            "merger.proj", spec.output_size, 2 * first[0], has_bias=spec.has_merger_biases
        )

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        x = x_PD.T.unflatten(1, (-1, num_columns))
        for weight, bias in self._convolutions:
            padding = (weight.shape[-1] - 1) // 2
            x = F.conv2d(x[None], weight, bias, stride=2, padding=padding)[0]
        return self._project(x.flatten(1).T)


class _PageMerger:
    """Projects each patch, and then neighbors of a row together, each time with a norm (Nemotron Parse)."""

    def __init__(self, spec: GridVisionSpec, page: PageSpec, tensors: VisionWeights) -> None:
        size, self._count = spec.output_size, page.columns_per_output
        first = tensors.read("merger.conv1.weight", size, spec.hidden_size, 1)
        self._first = Linear(first[..., 0].contiguous(), tensors.read("merger.conv1.bias", size))
        joined = tensors.read("merger.conv2.weight", size, size, 1, self._count)
        self._second = Linear(joined[:, :, 0].transpose(1, 2).flatten(1).contiguous())
        self._norms = [
            tensors.read_layer_norm(f"merger.layer_norm{i}", size, _PAGE_EPS) for i in (1, 2)
        ]

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        rows = self._norms[0](self._first(x_PD)).unflatten(0, (-1, num_columns))
        used = rows[:, : num_columns // self._count * self._count]
        joined = used.unflatten(1, (-1, self._count)).flatten(2).flatten(0, 1)
        return self._norms[1](self._second(joined))


class PageSummary:
    """Projects the outputs of learned rows before the patches of a page, side by side, to one output."""

    def __init__(self, spec: GridVisionSpec, page: PageSpec, tensors: VisionWeights) -> None:
        size, self._rows = spec.output_size, list(page.summary)
        inputs = len(self._rows) * spec.hidden_size
        self._project = tensors.read_linear("merger.sum_proj", size, inputs)
        self._norm = tensors.read_layer_norm("merger.layer_norm3", size, _PAGE_EPS)

    def __call__(self, x_RD: Tensor) -> Tensor:
        """Return the output [1, output size]."""
        return self._norm(self._project(x_RD[self._rows].flatten()[None]))


class _FramesMerger:
    """Projects each cell by an MLP, the cells of two equal frames by another one, and their output by a matrix.

    The outputs of both MLPs and of the matrix are normed.
    """

    def __init__(self, spec: GridVisionSpec, tensors: VisionWeights) -> None:
        self._size = size = spec.hidden_size * spec.merge_size**2
        self._mlps = [
            (
                tensors.read_linear(f"merger.{name}_linear.fc1", size, inputs),
                tensors.read_linear(f"merger.{name}_linear.fc2", size, size),
                tensors.read_layer_norm(f"merger.{name}_linear.norm", size, spec.norm_eps),
            )
            for name, inputs in (("spatial", size), ("temporal", 2 * size))
        ]
        self._last = tensors.read_linear("merger.mlp", spec.output_size, size)
        self._norm = tensors.read_rms_norm("merger.after_norm", spec.output_size, spec.merger_eps)

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        x = x_PD.reshape(-1, self._size)
        for first, second, norm in self._mlps:
            # Only the second MLP reads two frames.
            inputs = x.repeat(1, first.weight.shape[1] // self._size)
            x = norm(second(F.gelu(first(inputs))))
        return self._norm(self._last(x))


class _FramedMerger:
    """Projects each cell by three matrices, and adds learned embeddings before and after the image and after each row.

    The embedding after a row passes through the third matrix. All outputs are normed.
    """

    def __init__(
        self, spec: GridVisionSpec, tensors: VisionWeights, checkpoint: Checkpoint
    ) -> None:
        size, output = spec.hidden_size, spec.output_size
        self._activation = find_activation(checkpoint, spec.activation)
        self._norm = tensors.read_rms_norm("merger.before_rms", size, spec.norm_eps)
        self._square = _read_square(tensors, 2 * size, size, spec.merge_size)
        self._second = tensors.read_linear("merger.proj", 4 * size, 2 * size)
        self._third = tensors.read_linear("merger.mlp", output, 4 * size)
        self._newline_D = tensors.read("merger.image_newline", 4 * size)
        self._begin_D, self._end_D = (
            tensors.read(f"merger.image_{name}", output) for name in ("begin", "end")
        )
        self._output_norm = tensors.read_rms_norm("merger.after_rms", output, spec.norm_eps)

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        x = self._square(self._norm(x_PD).reshape(-1, self._square.weight.shape[1]))
        rows = self._second(self._activation(x)).unflatten(0, (-1, num_columns))
        ends = self._newline_D.expand(len(rows), 1, -1)
        x = self._third(torch.cat((rows, ends), 1).flatten(0, 1))
        return self._output_norm(torch.cat((self._begin_D[None], x, self._end_D[None])))


class _NewlineMerger:
    """Projects the normed patches of each cell by two matrices, and adds a learned embedding after each row."""

    def __init__(
        self, spec: GridVisionSpec, tensors: VisionWeights, checkpoint: Checkpoint
    ) -> None:
        size, inner = spec.hidden_size, spec.hidden_size * spec.merge_size**2
        self._activation = find_activation(checkpoint, spec.activation)
        self._norm = tensors.read_rms_norm("merger.before_rms", size, spec.norm_eps)
        self._square = _read_square(tensors, inner, size, spec.merge_size)
        self._second = tensors.read_linear("merger.proj", spec.output_size, inner)
        self._newline_D = tensors.read("merger.image_newline", spec.output_size)

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        x = self._square(self._norm(x_PD).reshape(-1, self._square.weight.shape[1]))
        rows = self._second(self._activation(x)).unflatten(0, (-1, num_columns))
        return torch.cat((rows, self._newline_D.expand(len(rows), 1, -1)), 1).flatten(0, 1)


def _read_square(tensors: VisionWeights, rows: int, size: int, side: int) -> Linear:
    """Return the product with a cell, whose weights are stored by element first, then by patch, as a convolution."""
    square = tensors.read("merger.square.weight", rows, size, side, side)
    return Linear(
        square.permute(0, 2, 3, 1).flatten(1).contiguous(), tensors.read("merger.square.bias", rows)
    )
