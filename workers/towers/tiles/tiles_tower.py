"""The vision tower of Llama 3.2 Vision, which reads the tiles of an image together.

Shapes: T tiles, P patches of a tile and its class token, D hidden size of the tower, N rows of all tiles with their
padding, K outputs.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.llama import TilesVisionSpec
from ....protocol.encoder_inputs.payloads import ImagePayload
from ..image_tower import ImageTower, TowerSource, wrong_size
from ..layers import LayersSpec, LayerWeights, Patches
from ..pixels import normalized_pixels, split_patches
from ..weights import Linear, VisionWeights, check_activation

_ROWS_TOGETHER = 8
"""The rows of a tile are padded to a multiple of this."""

_OUTER_EPS = 1e-5


class TilesTower(ImageTower):
    """The tower described by `spec` and its projection, in torch, with the layers that `make_layers` returns."""

    def __init__(self, spec: TilesVisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.image_size)
        self.spec = spec
        check_activation(source.checkpoint, spec.activation)
        tensors = source.weights("gated_positional_embedding.embedding")
        size, patch, count = spec.hidden_size, spec.patch_size, spec.outputs_per_tile
        num_grids = 1 + len(spec.grids)
        self._patches = tensors.read("patch_embedding.weight", size, 3, patch, patch).flatten(1)
        self._class_D = tensors.read("class_embedding", size)

        def of_tiles(name: str, *shape: int) -> Tensor:
            """Return an embedding of tiles for each grid, times its gate."""
            table = tensors.read(
                name, num_grids, spec.max_tiles * size * (shape[0] if shape else 1)
            )
            gate = tensors.read(f"{name.split('.')[0]}.gate", 1).tanh()
            return table.view(num_grids, spec.max_tiles, *(shape or (1,)), size) * gate

        self._before_GT1D = of_tiles("pre_tile_positional_embedding.embedding.weight")
        self._after_GT1D = of_tiles("post_tile_positional_embedding.embedding.weight")
        self._places_GTPD = of_tiles("gated_positional_embedding.tile_embedding.weight", count)
        gate = tensors.read("gated_positional_embedding.gate", 1).tanh()
        places = tensors.read("gated_positional_embedding.embedding", count, size)
        self._places_GTPD += (1 - gate) * places
        self._norms = [
            tensors.read_layer_norm(f"layernorm_{name}", size, _OUTER_EPS)
            for name in ("pre", "post")
        ]
        self._layers, self._gated_layers = (
            source.make_layers(
                _layers_spec(spec, features),
                (
                    _read_layer(spec, tensors, f"{name}.layers.{i}.", has_gates=has_gates)
                    for i in range(features[-1])
                ),
            )
            for name, features, has_gates in (
                ("transformer", tuple(sorted({*spec.feature_layers, spec.num_layers})), False),
                ("global_transformer", (spec.num_gated_layers,), True),
            )
        )
        name = "multi_modal_projector"
        weights = source.weights(f"{name}.weight")
        self._project = weights.read_linear(
            name, spec.output_size, size * (1 + len(spec.feature_layers))
        )

    def _black_image(self) -> ImagePayload:
        return replace(super()._black_image(), grid_columns=1)

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the outputs [K, output size] of an image, tile by tile."""
        spec, side, columns = self.spec, self.spec.image_size, image.grid_columns
        num_tiles = image.height // side
        shape = (num_tiles // columns, columns) if columns else (0, 0)
        if image.width != side or image.height % side or shape not in spec.grids:
            raise wrong_size(image, f"a grid of {side} x {side}")
        grid = 1 + spec.grids.index(shape)
        tiles = normalized_pixels(image, self._device, self._dtype)[0].chunk(num_tiles, 1)
        num = spec.image_size // spec.patch_size
        split = torch.stack([split_patches(tile, num, num, spec.patch_size) for tile in tiles])
        patches = F.linear(split, self._patches)
        x_TPD = F.pad(patches, (0, 0, 0, 0, 0, spec.max_tiles - num_tiles))
        x_TPD = x_TPD + self._before_GT1D[grid]
        classes = self._class_D.expand(spec.max_tiles, 1, -1)
        x_TPD = torch.cat((classes, x_TPD), 1) + self._places_GTPD[grid]
        x_TPD = F.pad(self._norms[0](x_TPD), (0, 0, 0, -x_TPD.shape[1] % _ROWS_TOGETHER))
        # The real rows come first, and see all rows. The others see only these.
        is_real_N = torch.zeros(x_TPD.shape[:2], dtype=torch.bool, device=self._device)
        is_real_N[:num_tiles, : spec.outputs_per_tile] = True
        is_real_N = is_real_N.flatten()
        order_N = torch.cat((is_real_N.nonzero(), (~is_real_N).nonzero())).flatten()
        num_real = num_tiles * spec.outputs_per_tile
        ends_N = torch.where(
            torch.arange(len(order_N), device=self._device) < num_real, len(order_N), num_real
        )
        patches_N = Patches(visible_P2=torch.stack((torch.zeros_like(ends_N), ends_N), 1))
        features = self._layers(x_TPD.flatten(0, 1)[order_N], patches_N)
        rows_of_tile = x_TPD.shape[1]
        after_ND = self._after_GT1D[grid].expand(-1, rows_of_tile, -1).flatten(0, 1)[order_N]
        [last_ND] = self._gated_layers(
            self._norms[1](features[spec.num_layers]) + after_ND, patches_N
        ).values()
        parts = [last_ND[:num_real]]
        if spec.feature_layers:
            chosen = [features[layer][:num_real] for layer in spec.feature_layers]
            parts.append(torch.stack(chosen, -1).flatten(1))
        return self._project(torch.cat(parts, -1))


def _layers_spec(spec: TilesVisionSpec, features: tuple[int, ...]) -> LayersSpec:
    return LayersSpec(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        head_dim=spec.hidden_size // spec.num_heads,
        feature_layers=features,
        activation=spec.activation,
        norm_eps=spec.norm_eps,
    )


def _read_layer(
    spec: TilesVisionSpec, tensors: VisionWeights, prefix: str, *, has_gates: bool
) -> LayerWeights:
    size, inner = spec.hidden_size, spec.intermediate_size

    def read(name: str) -> Linear:
        return tensors.read_linear(f"{prefix}self_attn.{name}_proj", size, size, has_bias=False)

    weights = LayerWeights(
        attention_norm=tensors.read_layer_norm(f"{prefix}input_layernorm", size, spec.norm_eps),
        qkv=[Linear.join([read(name) for name in "qkv"])],
        output=read("o"),
        mlp_norm=tensors.read_layer_norm(f"{prefix}post_attention_layernorm", size, spec.norm_eps),
        gate=None,
        up=tensors.read_linear(f"{prefix}mlp.fc1", inner, size),
        down=tensors.read_linear(f"{prefix}mlp.fc2", size, inner),
    )
    if has_gates:
        for name, linear in (("attn", weights.output), ("ffn", weights.down)):
            gate = tensors.read(f"{prefix}gate_{name}", 1).tanh()
            linear.scale_outputs(gate.expand(size))
    return weights
