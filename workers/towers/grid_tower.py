"""A vision tower that reads images of any size, and frames of videos.

Shapes: P patches of an image, R rows before them, D hidden size of the tower, K output rows, M patches of one output, H
heads, C cells. A cell is a square of patches that becomes one output.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.vision.grid import GridVisionSpec
from ...protocol.encoder_inputs.payloads import ImagePayload
from ...protocol.errors import EngineError
from .conv_layer import ConvLayer
from .image_tower import ImageTower, TowerSource, black_image, wrong_size
from .layers import Layers, LayersSpec, LayerWeights, MakeLayers, Patches, Router, Windows
from .pixels import normalized_pixels
from .projections.mergers import Merger, PageSummary, SummedMergers, read_marks, read_merger
from .rotary import PatchRotary
from .weights import Linear, Norm, VisionWeights, check_activation

_WARM_UP_OUTPUTS = 16
_AROUND_IMAGE = ((0,), (1,))


class _WindowOrder(NamedTuple):
    """The order of cells, int64 [C], in which each window is contiguous, and the windows."""

    order_C: Tensor
    windows: Windows


class _Part(NamedTuple):
    """Consecutive layers, and the order of cells in which patches attend to those near them, or None."""

    layers: Layers | ConvLayer
    band: Literal["rows", "columns"] | None = None


class GridTower(ImageTower):
    """The tower described by `spec` and its projection, in torch, with the layers that `make_layers` returns."""

    def __init__(self, spec: GridVisionSpec, source: TowerSource) -> None:
        size = spec.output_size * (1 + len(spec.deepstack_layers))
        max_frames = max(spec.frames_per_patch, spec.frames_per_tubelet)
        super().__init__(source, size, spec.unit * _WARM_UP_OUTPUTS, max_frames)
        self.spec = spec
        tensors = source.weights("patch_embed.proj.weight", spec.tensor_names)
        size, patch_size = spec.hidden_size, spec.patch_size

        def channels_first(name: str, num_frames: int, num_triples: int) -> Tensor:
            """Return weights of patches that are stored as groups of three channels, one group after another."""
            rows = tensors.read(name, size, 3 * num_frames * patch_size**2)
            return rows.unflatten(1, (num_triples, 3, -1)).transpose(1, 2).flatten(1).contiguous()

        name, num_frames = "patch_embed.proj.weight", spec.frames_per_patch
        if spec.patch_layout == "pixels":
            self._patches = channels_first(name, 1, patch_size**2)
        elif spec.patch_layout == "frames":
            self._patches = channels_first(name, num_frames, num_frames)
        elif spec.patch_layout == "channels":
            self._patches = tensors.read(name, size, 3 * num_frames * patch_size**2)
        else:
            shape = size, 3, num_frames, patch_size, patch_size
            self._patches = tensors.read(name, *shape).flatten(1)
        self._tubelets: Tensor | None = None
        if num_frames := spec.frames_per_tubelet:
            self._tubelets = channels_first("patch_embed.tubelets.weight", num_frames, num_frames)
        self._patches_bias: Tensor | None = None
        if spec.has_patch_bias:
            self._patches_bias = tensors.read("patch_embed.proj.bias", size)
        self._patch_norm: Norm | None = None
        outer_eps = spec.outer_eps or spec.norm_eps
        if spec.has_patch_norm or spec.norms_positions:
            self._patch_norm = tensors.read_norm("patch_norm", size, spec.norm_kind, outer_eps)
        self._positions: Tensor | None = None
        if spec.position_side:
            side = spec.position_side
            num_unused = int(spec.has_class_position)
            shape_of_table = (side, side) if spec.has_square_positions else (side**2 + num_unused,)
            table = tensors.read("pos_embed.weight", *shape_of_table, size).view(-1, size)
            self._positions = table[num_unused:]
        self._first_RD: Tensor | None = None
        first_angles: tuple[float, ...] = ()
        if spec.has_class_token:
            self._first_RD = tensors.read("class_embedding", size)[None]
            if spec.has_class_angles:
                num_angles = size // spec.num_heads // 2
                first_angles = tuple(tensors.read("class_pos_emb", 1, num_angles)[0].tolist())
            elif spec.has_class_position:
                self._first_RD = self._first_RD + table[:1]
            else:
                self._first_RD = self._first_RD + tensors.read("cls_position_embedding", size)
            self._first_RD = self._first_RD.expand(spec.num_class_rows, -1)
        elif spec.has_registers:
            self._first_RD = tensors.read_table("registers.weight", size)
        check_activation(source.checkpoint, spec.activation)
        self._rotary = _rotary(spec, first_angles)
        self._parts = self._make_parts(tensors, source.make_layers)
        self._final_norm: Norm | None = None
        if spec.has_final_norm:
            self._final_norm = tensors.read_norm("final_norm", size, spec.norm_kind, outer_eps)
        self._summed = SummedMergers(spec, tensors) if spec.summed_layers else None
        if self._summed is None:
            self._merge = read_merger(spec, tensors, source.checkpoint)
        self._summary = PageSummary(spec, spec.page, tensors) if spec.page is not None else None
        self._marks_MD = read_marks(spec, tensors) if spec.num_words else None
        self._deepstack = {
            layer: Merger(spec, tensors, f"deepstack_merger_list.{i}.", norm="squares")
            for i, layer in enumerate(spec.deepstack_layers)
        }

    def _make_parts(self, tensors: VisionWeights, make_layers: MakeLayers) -> list[_Part]:
        """Return the layers, divided where there are layers with convolutions, experts or another band."""
        spec, found, first = self.spec, list[_Part](), 0
        bands = spec.bands or (None,) * spec.num_layers
        has_experts = [bool(count) for count in spec.num_experts or (0,) * spec.num_layers]
        for index in range(spec.num_layers):
            if index + 1 in spec.conv_layers:
                found.append(_Part(ConvLayer(spec, tensors, f"blocks.{index}.")))
                first = index + 1
            elif (
                index + 1 == spec.num_layers
                or index + 2 in spec.conv_layers
                or bands[index] != bands[index + 1]
                or has_experts[index] != has_experts[index + 1]
            ):
                indices = range(first, index + 1)
                part = _layers_spec(spec, indices, self._rotary)
                weights = (_read_layer(spec, tensors, i) for i in indices)
                found.append(_Part(make_layers(part, weights), bands[index]))
                first = index + 1
        return found

    def _black_image(self) -> ImagePayload:
        page = self.spec.page
        return super()._black_image() if page is None else black_image(page.width, page.height)

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the outputs [K, elements] of an image: an embedding, then its parts for the decoder's first layers."""
        spec = self.spec
        unit, most = spec.unit, self._max_frames
        if spec.page is not None and (image.width, image.height) != (
            spec.page.width,
            spec.page.height,
        ):
            raise wrong_size(image, f"{spec.page.width} x {spec.page.height}")
        if image.width % unit or image.height % unit or not 0 < image.num_frames <= most:
            raise EngineError(
                f"an image has {image.num_frames} frames of {image.width} x {image.height} pixels, but the "
                f"model reads at most {most} frames, with sides that are multiples of {unit} pixels"
            )
        if spec.margin is not None and not min(image.original_width, image.original_height) > 0:
            raise EngineError("an image has no size without its margins, which the model needs")
        rows, columns = image.height // spec.unit, image.width // spec.unit
        row_P, column_P = self._places(rows, columns)
        patches, per_patch = self._patches, spec.frames_per_patch
        if self._tubelets is not None and image.num_frames > per_patch:
            patches, per_patch = self._tubelets, spec.frames_per_tubelet
        x_PD = F.linear(self._split_patches(image, per_patch), patches, self._patches_bias)
        if self._patch_norm is not None and not spec.norms_positions:
            x_PD = self._patch_norm(x_PD)
        if self._positions is not None:
            height, width = rows * spec.merge_size, columns * spec.merge_size
            x_PD = x_PD + self._interpolated(row_P, column_P, height, width)
        places_P2 = None if spec.rotary is None else torch.stack((row_P, column_P), 1)
        if self._first_RD is not None:
            x_PD = torch.cat((self._first_RD, x_PD))
            if places_P2 is not None:
                first = -1 if spec.has_class_angles else 0
                places_P2 = F.pad(places_P2 + first + 1, (0, 0, 1, 0), value=first)
        if self._patch_norm is not None and spec.norms_positions:
            x_PD = self._patch_norm(x_PD)
        order: _WindowOrder | None = None
        if spec.window_size:
            order = self._window_order(rows, columns)
            x_PD = _reordered(x_PD, order.order_C)
            if places_P2 is not None:
                places_P2 = _reordered(places_P2, order.order_C)
        windows = None if order is None else order.windows
        features: dict[int, Tensor] = {}
        for layers, band in self._parts:
            if isinstance(layers, ConvLayer):
                x_PD = layers(x_PD, rows, columns)
            elif band is not None:
                x_PD = self._attend_nearby(layers, x_PD, places_P2, (rows, columns), band)
            else:
                features = layers(x_PD, Patches(places_P2, windows))
                x_PD = features[max(features)]
        last_PD = x_PD[-len(row_P) :]
        if self._final_norm is not None:
            last_PD = self._final_norm(last_PD)
        if image.is_frame and spec.frame_merge > 1:
            side = spec.frame_merge
            cells = last_PD.view(rows // side, side, columns // side, side, -1)
            last_PD, columns = cells.mean((1, 3)).flatten(0, 1), columns // side
        if self._summed is None:
            merged = [self._merge(last_PD, columns)]
        else:
            assert self._final_norm is not None
            normed = [self._final_norm(features[layer]) for layer in spec.summed_layers]
            merged = [self._summed(normed, columns)]
        merged += [
            merge(features[layer], columns) for layer, merge in sorted(self._deepstack.items())
        ]
        outputs = torch.cat(merged, -1)
        if self._summary is not None:
            outputs = torch.cat((outputs, self._summary(x_PD)))
        if self._marks_MD is not None:
            before, after = image.marks if image.is_frame else _AROUND_IMAGE
            parts = self._marks_MD[list(before)], outputs, self._marks_MD[list(after)]
            outputs = torch.cat(parts)
        if image.kept:
            kept = torch.frombuffer(bytearray(image.kept), dtype=torch.int32)
            outputs = outputs[kept.to(outputs.device).long()]
        return outputs if order is None else outputs[order.order_C.argsort()]

    def _attend_nearby(
        self,
        layers: Layers,
        x_PD: Tensor,
        places_P2: Tensor | None,
        sides: tuple[int, int],
        band: Literal["rows", "columns"],
    ) -> Tensor:
        """Return the outputs of layers in which patches attend to those near them, in this order of cells."""
        order_C = torch.arange(sides[0] * sides[1], device=self._device)
        if band == "columns":
            order_C = order_C.view(sides).T.flatten()
            x_PD = _reordered(x_PD, order_C)
            places_P2 = None if places_P2 is None else _reordered(places_P2, order_C)
        at_P = torch.arange(len(x_PD), device=self._device)
        first_P = (at_P - self.spec.band_size).clamp(min=0)
        end_P = (at_P + self.spec.band_size + 1).clamp(max=len(x_PD))
        features = layers(x_PD, Patches(places_P2, visible_P2=torch.stack((first_P, end_P), 1)))
        return _reordered(features[max(features)], order_C.argsort())

    def _split_patches(self, image: ImagePayload, frames_per_patch: int) -> Tensor:
        """Return the normalized pixels of each patch, cell by cell, [P, 3 * frames per patch * patch size ** 2]."""
        spec, size, merge = self.spec, self.spec.patch_size, self.spec.merge_size
        frames = normalized_pixels(image, self._device, self._dtype)
        if spec.margin is not None:
            mean, std = frames.new_tensor(image.mean), frames.new_tensor(image.std)
            margin_31 = ((spec.margin * image.scale - mean) / std)[:, None]
            frames[:, :, image.original_height :] = margin_31[..., None]
            frames[:, :, :, image.original_width :] = margin_31[..., None]
        missing = frames_per_patch - len(frames)
        if missing:
            frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
        rows, columns = image.height // spec.unit, image.width // spec.unit
        cells = frames.view(len(frames), 3, rows, merge, size, columns, merge, size)
        return cells.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, 3 * len(frames) * size**2)

    def _places(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return the row and the column of each patch, in the order of cells, int64 [P, 2]."""
        merge = self.spec.merge_size
        row = torch.arange(rows * merge, device=self._device).view(rows, 1, merge, 1)
        column = torch.arange(columns * merge, device=self._device).view(1, columns, 1, merge)
        shape = rows, columns, merge, merge
        return row.expand(shape).flatten(), column.expand(shape).flatten()

    def _interpolated(self, row_P: Tensor, column_P: Tensor, height: int, width: int) -> Tensor:
        """Return the learned position of each patch [P, D], interpolated from the table."""
        assert self._positions is not None
        side = self.spec.position_side
        if self.spec.interpolation in ("antialiased", "antialiased bicubic", "cropped"):
            crops = self.spec.interpolation == "cropped"
            mode = "bicubic" if self.spec.interpolation == "antialiased bicubic" else "bilinear"
            size = (max(height, width),) * 2 if crops else (height, width)
            table = self._positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
            resized = F.interpolate(table, size, mode=mode, antialias=not crops)
            return resized[0, :, row_P, column_P].T.to(self._dtype)
        swaps = self.spec.interpolation == "swapped sides"
        if swaps:
            number_P = row_P * width + column_P
            height, width = width, height
            row_P, column_P = number_P // width, number_P % width
        if self.spec.interpolation != "corners":
            # Coordinates are from -1 to 1.
            offset = self.spec.side_offset
            places = [
                (2 * at_P + 1) / (length + offset) - 1
                for at_P, length in ((column_P, width), (row_P, height))
            ]
            table = self._positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
            grid = torch.stack(places, -1).float()[None, :, None]
            found = F.grid_sample(
                table,
                grid,
                mode="bicubic" if self.spec.interpolation == "centers" else "bilinear",
                padding_mode="zeros" if swaps else "border",
                align_corners=False,
            )
            return found[0, :, :, 0].T.to(self._dtype)
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

    def _window_order(self, rows: int, columns: int) -> _WindowOrder:
        """Return the windows of a grid of cells. Windows at the right and at the bottom may be smaller."""
        side = self.spec.window_size // self.spec.unit
        cells = torch.arange(rows * columns).view(rows, columns)
        windows = [
            cells[row : row + side, column : column + side].flatten()
            for row in range(0, rows, side)
            for column in range(0, columns, side)
        ]
        # Put windows of the same size next to each other, so that they are computed together.
        windows.sort(key=len, reverse=True)
        sizes = [len(window) for window in windows]
        groups = [
            (sizes.count(size), size * self.spec.merge_size**2) for size in dict.fromkeys(sizes)
        ]
        return _WindowOrder(torch.cat(windows).to(self._device), groups)


def _reordered(x: Tensor, order_C: Tensor) -> Tensor:
    """Return rows, one per patch, in another order of their cells."""
    return x.unflatten(0, (len(order_C), -1))[order_C].flatten(0, 1)


def _layers_spec(spec: GridVisionSpec, indices: range, rotary: PatchRotary | None) -> LayersSpec:
    """Return the description of some layers. Only a tower without convolutions has features of earlier layers."""
    return LayersSpec(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        head_dim=spec.size_of_heads,
        feature_layers=tuple(sorted({*spec.deepstack_layers, *spec.summed_layers, len(indices)})),
        activation=spec.activation,
        norm_kind=spec.norm_kind,
        norm_eps=spec.norm_eps,
        rotary=rotary,
        full_layers=spec.full_layers,
        qk_norm="head" if spec.has_head_norms else None,
        has_gate=spec.has_gate,
        gate_limit=spec.gate_limit,
        has_first_biases=spec.has_first_biases and spec.bands[indices[0]] is not None,
        num_chosen=spec.num_chosen if _num_experts(spec, indices[0]) else 0,
    )


def _num_experts(spec: GridVisionSpec, index: int) -> int:
    """Return the number of experts of a layer's MLP, or 0."""
    return spec.num_experts[index] if spec.num_experts else 0


def _rotary(spec: GridVisionSpec, first_angles: tuple[float, ...] = ()) -> PatchRotary | None:
    if spec.rotary is None:
        return None
    # Compute in float32, as transformers does.
    return PatchRotary(
        spec.rotary,
        spec.rope_theta,
        spec.size_of_heads,
        in_float32=True,
        first_angles=first_angles,
    )


def _read_layer(spec: GridVisionSpec, tensors: VisionWeights, index: int) -> LayerWeights:
    prefix = f"blocks.{index}."
    size, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.size_of_heads
    num_experts = _num_experts(spec, index)
    up, down = ("up_proj", "down_proj") if spec.has_gate else ("fc1", "fc2")

    def read(name: str, rows: int, columns: int) -> Linear:
        return tensors.read_linear(prefix + name, rows, columns, has_bias=spec.has_biases)

    def head_norm(name: str) -> Norm | None:
        if not spec.has_head_norms:
            return None
        return tensors.read_rms_norm(f"{prefix}attn.{name}_norm", head_dim, spec.norm_eps)

    norms = [
        tensors.read_norm(f"{prefix}norm{i}", size, spec.norm_kind, spec.norm_eps) for i in (1, 2)
    ]
    q_size = spec.num_heads * head_dim
    kv_size = (spec.num_kv_heads or spec.num_heads) * head_dim
    if spec.has_joined_qkv:
        qkv = read("attn.qkv", q_size + 2 * kv_size, size)
    else:
        sizes = (("q", q_size), ("k", kv_size), ("v", kv_size))
        q, k, v = (read(f"attn.{name}_proj", rows, size) for name, rows in sizes)
        rotary = _rotary(spec)
        if rotary is not None and (order_K := rotary.stored_order) is not None:
            q, k = q.reorder_heads(order_K), k.reorder_heads(order_K)
        qkv = Linear.join([q, k, v])
    if spec.num_kv_heads:
        qkv = _with_own_keys(spec, qkv)
    router: Router | None = None
    gate: Linear | None
    if num_experts:
        gate, inputs, last = _read_experts(spec, tensors, f"{prefix}mlp.experts.", num_experts)
        router = Router(
            tensors.read(f"{prefix}mlp.gate_weight", num_experts, size),
            tensors.read(f"{prefix}mlp.router_bias", num_experts),
        )
    else:
        gate = read("mlp.gate_proj", inner, size) if spec.has_gate else None
        inputs, last = read(f"mlp.{up}", inner, size), read(f"mlp.{down}", size, inner)
    output = read("attn.proj", size, q_size)
    if spec.has_layer_scales:
        for i, linear in enumerate((output, last), 1):
            linear.scale_outputs(tensors.read(f"{prefix}lambda_{i}", size))
    first_bias_H: Tensor | None = None
    if spec.has_first_biases and spec.bands[index] is not None:
        first_bias_H = tensors.read(f"{prefix}attn.sinks", spec.num_heads)
    before: list[Norm | None] = [None, None] if spec.norms_outputs else [*norms]
    after: list[Norm | None] = [*norms] if spec.norms_outputs else [None, None]
    return LayerWeights(
        attention_norm=before[0],
        qkv=[qkv],
        output=output,
        mlp_norm=before[1],
        attention_output_norm=after[0],
        mlp_output_norm=after[1],
        gate=gate,
        up=inputs,
        down=last,
        query_norm=head_norm("q"),
        key_norm=head_norm("k"),
        first_bias_H=first_bias_H,
        router=router,
    )


def _read_experts(
    spec: GridVisionSpec, tensors: VisionWeights, prefix: str, count: int
) -> tuple[Linear, Linear, Linear]:
    """Return the gates, the up and the down projections of all experts, which files store together or apart."""

    def read(name: str, rows: int, columns: int) -> Tensor:
        if f"{prefix}{name}.weight" in tensors:
            return tensors.read(f"{prefix}{name}.weight", count, rows, columns)
        names = (f"{prefix}{i}.{name}.weight" for i in range(count))
        return torch.stack([tensors.read(each, rows, columns) for each in names])

    size, inner = spec.hidden_size, spec.expert_size
    gates, ups = (read(name, inner, size).flatten(0, 1) for name in ("gate_proj", "up_proj"))
    downs = read("down_proj", size, inner).transpose(0, 1).flatten(1)
    return Linear(gates), Linear(ups), Linear(downs)


def _with_own_keys(spec: GridVisionSpec, qkv: Linear) -> Linear:
    """Return a projection in which every query head has its own copy of the key and value head that it shares."""
    num_groups, head_dim = spec.num_kv_heads, spec.size_of_heads
    num_queries = spec.num_heads * head_dim
    rows = torch.arange(len(qkv.weight), device=qkv.weight.device)
    shared = rows[num_queries:].view(2, num_groups, 1, head_dim)
    own = shared.expand(-1, -1, spec.num_heads // num_groups, -1).flatten()
    order = torch.cat((rows[:num_queries], own))
    return Linear(qkv.weight[order], None if qkv.bias is None else qkv.bias[order])
