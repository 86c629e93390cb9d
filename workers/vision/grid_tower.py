"""A vision tower that reads images of any size, and frames of videos.

Shapes: P patches of an image, D hidden size of the tower, K output rows, M patches of one output, H heads,
C cells, each of which is a square of patches that becomes one output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.vision.grid import GridVisionSpec
from ...protocol.errors import EngineError
from ...protocol.messages import ImagePayload
from ..layers.rope import RotaryTables, apply_rotary
from ..loaders import Checkpoint
from .pixels import normalized_pixels
from .weights import Norm, VisionWeights, find_activation

_WARM_UP_OUTPUTS = 16

_decoder = msgspec.msgpack.Decoder(ImagePayload)

_Groups: TypeAlias = Sequence[tuple[int, int]]
"""(number of windows, patches of each) of consecutive windows that have the same size."""


class _Windows(NamedTuple):
    """The order of cells in which windows follow one another, int64 [C], and the windows."""

    order_C: Tensor
    groups: _Groups


class GridTower:
    """The tower of `spec` and its projection, in torch.

    It computes one image at a time, so its numbers do not depend on other images.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """

    def __init__(
        self,
        spec: GridVisionSpec,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        num_threads: int = 1,
    ) -> None:
        self.spec = spec
        self._device, self._dtype = device, dtype
        self._num_threads = num_threads
        tensors = VisionWeights(
            checkpoint, "patch_embed.proj.weight", device, dtype, spec.tensor_names
        )
        size, patch_size = spec.hidden_size, spec.patch_size
        shape = size, 3, spec.frames_per_patch, patch_size, patch_size
        self._patches = tensors.read("patch_embed.proj.weight", *shape).flatten(1)
        self._patches_bias: Tensor | None = None
        if spec.has_patch_bias:
            self._patches_bias = tensors.read("patch_embed.proj.bias", size)
        self._positions: Tensor | None = None
        if spec.position_side:
            self._positions = tensors.read("pos_embed.weight", spec.position_side**2, size)
        half = size // spec.num_heads // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        self._inv_freq = (1.0 / spec.rope_theta**exponents).to(device)
        activation = find_activation(checkpoint, spec.activation)
        self._layers = [
            _Layer(spec, tensors, f"blocks.{index}.", activation)
            for index in range(spec.num_layers)
        ]
        self._merge = _Merger(spec, tensors, "merger.", norms_squares=False)
        self._deepstack = {
            layer: _Merger(spec, tensors, f"deepstack_merger_list.{i}.", norms_squares=True)
            for i, layer in enumerate(spec.deepstack_layers)
        }

    def encode(self, data: bytes) -> Tensor:
        """Return the outputs [K, elements] for the image in the data of an encoder input.

        Raises:
            EngineError: There is none, which a correct frontend never sends.
        """
        try:
            image = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise EngineError(f"an encoder input is not an image: {error}") from error
        expected = 3 * image.width * image.height * image.num_frames
        if len(image.pixels) != expected:
            raise EngineError(f"an image has {len(image.pixels)} bytes, expected {expected}")
        return self(image)

    @torch.inference_mode()
    def __call__(self, image: ImagePayload) -> Tensor:
        """Return the outputs [K, elements] of an image: an embedding, then its parts for the decoder's first layers.

        Raises:
            EngineError: The image has a size that the tower does not read.
        """
        unit, most = self.spec.unit, self.spec.frames_per_patch
        if image.width % unit or image.height % unit or not 0 < image.num_frames <= most:
            raise EngineError(
                f"an image has {image.num_frames} frames of {image.width} x {image.height} pixels, "
                f"the model reads at most {most} frames of multiples of {unit} pixels"
            )
        if self._device.type != "cpu":
            return self._encode(image)
        # Between images a second thread would only compete with those of a native program.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return self._encode(image)
        finally:
            torch.set_num_threads(num_threads)

    def warm_up(self) -> None:
        """Encode a black image."""
        side, ones = self.spec.unit * _WARM_UP_OUTPUTS, (1.0, 1.0, 1.0)
        self(ImagePayload(side, side, bytes(3 * side * side), 1.0, ones, ones))

    def _encode(self, image: ImagePayload) -> Tensor:
        spec = self.spec
        num_patches = image.width * image.height // spec.patch_size**2
        rows, columns = image.height // spec.unit, image.width // spec.unit
        row_P, column_P = self._places(rows, columns)
        x_PD = F.linear(self._split_patches(image), self._patches, self._patches_bias)
        if self._positions is not None:
            height, width = rows * spec.merge_size, columns * spec.merge_size
            x_PD = x_PD + self._interpolated(row_P, column_P, height, width)
        tables = self._rotary_tables(row_P, column_P)
        whole: _Groups = [(1, num_patches)]
        windows: _Windows | None = None
        if spec.window_size:
            windows = self._windows(rows, columns)
            x_PD = _reordered(x_PD, windows.order_C)
            tables = RotaryTables(*(_reordered(table, windows.order_C) for table in tables))
        deepstack: list[Tensor] = []
        for number, layer in enumerate(self._layers, 1):
            attends_all = windows is None or number in spec.full_layers
            x_PD = layer(x_PD, tables, whole if windows is None or attends_all else windows.groups)
            if number in self._deepstack:
                deepstack.append(self._deepstack[number](x_PD))
        outputs = torch.cat((self._merge(x_PD), *deepstack), -1)
        if windows is not None:
            outputs = outputs[windows.order_C.argsort()]
        return outputs

    def _split_patches(self, image: ImagePayload) -> Tensor:
        """Return the normalized pixels of each patch, cell by cell, [P, 3 * frames per patch * patch size ** 2]."""
        spec, size, merge = self.spec, self.spec.patch_size, self.spec.merge_size
        frames = normalized_pixels(image, self._device, self._dtype)
        missing = spec.frames_per_patch - len(frames)
        if missing:
            frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
        rows, columns = image.height // spec.unit, image.width // spec.unit
        cells = frames.view(len(frames), 3, rows, merge, size, columns, merge, size)
        return cells.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, 3 * len(frames) * size**2)

    def _places(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return the row and the column of each patch, cell by cell, int64 [P]."""
        merge = self.spec.merge_size
        row = torch.arange(rows * merge, device=self._device).view(rows, 1, merge, 1)
        column = torch.arange(columns * merge, device=self._device).view(1, columns, 1, merge)
        shape = rows, columns, merge, merge
        return row.expand(shape).flatten(), column.expand(shape).flatten()

    def _rotary_tables(self, row_P: Tensor, column_P: Tensor) -> RotaryTables:
        angles = torch.cat(
            [torch.outer(at_P.float(), self._inv_freq) for at_P in (row_P, column_P)], 1
        )
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
        return RotaryTables(cos, sin)

    def _interpolated(self, row_P: Tensor, column_P: Tensor, height: int, width: int) -> Tensor:
        """Return the learned position of each patch [P, D]; the corners of the table are those of the image."""
        assert self._positions is not None
        side = self.spec.position_side
        axes = []
        for at_P, length in ((row_P, height), (column_P, width)):
            place_P = at_P.float() * (side - 1) / max(length - 1, 1)
            first_P = place_P.floor().long()
            part_P = place_P - first_P
            both = first_P, (first_P + 1).clamp(max=side - 1)
            axes.append(list(zip(both, (1 - part_P, part_P), strict=True)))
        corners = [
            self._positions[row * side + column].float() * (row_part * column_part)[:, None]
            for row, row_part in axes[0]
            for column, column_part in axes[1]
        ]
        return torch.stack(corners, 1).sum(1).to(self._dtype)

    def _windows(self, rows: int, columns: int) -> _Windows:
        """Return the windows of a grid of cells. Those at the right and at the bottom may be smaller."""
        side = self.spec.window_size // self.spec.unit
        cells = torch.arange(rows * columns).view(rows, columns)
        windows = [
            cells[row : row + side, column : column + side].flatten()
            for row in range(0, rows, side)
            for column in range(0, columns, side)
        ]
        # Those of one size follow one another, so that they are computed at once.
        windows.sort(key=len, reverse=True)
        sizes = [len(window) for window in windows]
        groups = [
            (sizes.count(size), size * self.spec.merge_size**2) for size in dict.fromkeys(sizes)
        ]
        return _Windows(torch.cat(windows).to(self._device), groups)


def _reordered(x: Tensor, order_C: Tensor) -> Tensor:
    """Return rows, one for each patch, in another order of their cells."""
    return x.unflatten(0, (len(order_C), -1))[order_C].flatten(0, 1)


class _Layer:
    """A layer of attention and an MLP, each after its norm."""

    def __init__(
        self,
        spec: GridVisionSpec,
        tensors: VisionWeights,
        prefix: str,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        size, inner = spec.hidden_size, spec.intermediate_size
        self._num_heads = spec.num_heads
        self._activation = activation
        self._norms = [_read_norm(spec, tensors, f"{prefix}norm{i}", size) for i in (1, 2)]
        self._qkv = tensors.read_linear(f"{prefix}attn.qkv", 3 * size, size)
        self._output = tensors.read_linear(f"{prefix}attn.proj", size, size)
        up, down = ("up_proj", "down_proj") if spec.has_gate else ("fc1", "fc2")
        self._gate = None
        if spec.has_gate:
            self._gate = tensors.read_linear(f"{prefix}mlp.gate_proj", inner, size)
        self._up = tensors.read_linear(f"{prefix}mlp.{up}", inner, size)
        self._down = tensors.read_linear(f"{prefix}mlp.{down}", size, inner)

    def __call__(self, x_PD: Tensor, tables: RotaryTables, groups: _Groups) -> Tensor:
        qkv = self._qkv(self._norms[0](x_PD)).view(len(x_PD), 3, self._num_heads, -1)
        q, k, v = qkv.unbind(1)
        # In float32, as transformers does it.
        q, k = (apply_rotary(part.float(), tables).to(part.dtype) for part in (q, k))
        attended = []
        start = 0
        for count, length in groups:
            window = slice(start, start + count * length)
            start = window.stop
            parts = (
                part[window].unflatten(0, (count, length)).transpose(1, 2) for part in (q, k, v)
            )
            out = F.scaled_dot_product_attention(*parts)
            attended.append(out.transpose(1, 2).reshape(count * length, -1))
        x_PD = x_PD + self._output(torch.cat(attended))
        normed = self._norms[1](x_PD)
        hidden = self._up(normed)
        if self._gate is None:
            hidden = self._activation(hidden)
        else:
            hidden = self._activation(self._gate(normed)) * hidden
        return x_PD + self._down(hidden)


class _Merger:
    """Projects the patches of each cell; with `norms_squares` they are normed together."""

    def __init__(
        self, spec: GridVisionSpec, tensors: VisionWeights, prefix: str, *, norms_squares: bool
    ) -> None:
        self._size = spec.hidden_size * spec.merge_size**2
        self._norms_squares = norms_squares
        size = self._size if norms_squares else spec.hidden_size
        self._norm = _read_norm(spec, tensors, f"{prefix}norm", size)
        self._first = tensors.read_linear(f"{prefix}fc1", self._size, self._size)
        self._second = tensors.read_linear(f"{prefix}fc2", spec.output_size, self._size)

    def __call__(self, x_PD: Tensor) -> Tensor:
        """Return the projected cells [C, output size]."""
        if self._norms_squares:
            x = self._norm(x_PD.reshape(-1, self._size))
        else:
            x = self._norm(x_PD).reshape(-1, self._size)
        return self._second(F.gelu(self._first(x)))


def _read_norm(spec: GridVisionSpec, tensors: VisionWeights, name: str, size: int) -> Norm:
    if spec.norm_kind == "rms":
        return tensors.read_rms_norm(name, size, spec.norm_eps)
    return tensors.read_layer_norm(name, size, spec.norm_eps)
