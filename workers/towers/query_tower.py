"""A vision tower whose learned queries read the features of an image (DeepSeek-OCR 2).

Shapes: P features of an image, Q queries, D hidden size of the reader.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.checkpoint.vision.deepseek import NUM_QUERIES, QueryVisionSpec
from ...protocol.encoder_inputs.payloads import ImagePayload
from .image_tower import ImageTower, TowerSource, wrong_size
from .layers import LayersSpec, LayerWeights, Patches
from .pixels import normalized_pixels
from .rotary import PatchRotary
from .sam_encoder import SamEncoder
from .weights import Linear, VisionWeights, check_activation


class QueryTower(ImageTower):
    """The tower described by `spec`: an image encoder in torch, and a reader with the layers of `make_layers`."""

    def __init__(self, spec: QueryVisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.sam.image_size)
        self.spec = spec
        for activation in (spec.sam.activation, spec.reader_activation):
            check_activation(source.checkpoint, activation)

        def read(marker: str) -> VisionWeights:
            return source.weights(marker, NAMES)

        size = spec.reader_size
        self._encode_image = SamEncoder(spec.sam, read("patch_embed.projection.weight"))
        tensors = read("query_768_resolution.weight")
        self._queries = [
            tensors.read(f"query_{side}_resolution.weight", count, size)
            for side, count in zip((768, 1024), NUM_QUERIES, strict=True)
        ]
        self._read = source.make_layers(
            _layers_spec(spec),
            (_read_layer(spec, tensors, f"reader.layers.{i}.") for i in range(spec.reader_layers)),
        )
        self._norm = tensors.read_rms_norm("reader.norm", size, spec.reader_eps)
        self._project = read("multi_modal_projector.weight").read_linear(
            "multi_modal_projector", spec.output_size, size
        )
        self._separator_D = read("view_separator").read("view_separator", spec.output_size)

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the embeddings [K, output size] of a tile, or of a whole image and the separator after it."""
        unit = self.spec.sam.unit
        if image.width != image.height or image.width % unit:
            raise wrong_size(image, f"squares whose sides are multiples of {unit}")
        features_PD = self._encode_image(normalized_pixels(image, self._device, self._dtype)[0])
        num_features = len(features_PD)
        queries_QD = self._queries[num_features > NUM_QUERIES[0]]
        sequence = torch.cat((features_PD, queries_QD))
        at = torch.arange(len(sequence), device=self._device)
        # Features see all features, and queries what comes before them.
        visible_P2 = torch.stack((torch.zeros_like(at), (at + 1).clamp(min=num_features)), 1)
        places_P2 = torch.stack((at, at), 1)
        [x] = self._read(sequence, Patches(places_P2, visible_P2=visible_P2)).values()
        outputs = self._project(self._norm(x[num_features:]))
        if not image.is_last:
            return outputs
        return torch.cat((outputs, self._separator_D[None].to(outputs.dtype)))


def _layers_spec(spec: QueryVisionSpec) -> LayersSpec:
    head_dim = spec.reader_size // spec.reader_heads
    return LayersSpec(
        hidden_size=spec.reader_size,
        intermediate_size=spec.reader_intermediate_size,
        num_heads=spec.reader_heads,
        head_dim=head_dim,
        feature_layers=(spec.reader_layers,),
        activation=spec.reader_activation,
        norm_kind="rms",
        norm_eps=spec.reader_eps,
        rotary=PatchRotary("sequence", spec.reader_theta, head_dim),
        has_gate=True,
    )


def _read_layer(spec: QueryVisionSpec, tensors: VisionWeights, prefix: str) -> LayerWeights:
    size, inner, eps = spec.reader_size, spec.reader_intermediate_size, spec.reader_eps
    head_dim = size // spec.reader_heads

    def read(name: str, rows: int, columns: int) -> Linear:
        return tensors.read_linear(prefix + name, rows, columns, has_bias=False)

    # Each query head gets its own copy of the keys and values that it shares.
    num_shared = spec.reader_heads // spec.reader_kv_heads
    shared = [
        tensors.read_linear(
            f"{prefix}self_attn.{name}_proj", spec.reader_kv_heads * head_dim, size
        ).repeat_heads(head_dim, num_shared)
        for name in "kv"
    ]
    return LayerWeights(
        attention_norm=tensors.read_rms_norm(f"{prefix}input_layernorm", size, eps),
        qkv=[Linear.join([tensors.read_linear(f"{prefix}self_attn.q_proj", size, size), *shared])],
        output=read("self_attn.o_proj", size, size),
        mlp_norm=tensors.read_rms_norm(f"{prefix}post_attention_layernorm", size, eps),
        gate=read("mlp.gate_proj", inner, size),
        up=read("mlp.up_proj", inner, size),
        down=read("mlp.down_proj", size, inner),
    )


_SAM = r"(.*\.)?(sam_model|vision_tower\.sam_encoder)\."
NAMES = (
    (_SAM + r"blocks\.(\d+)\.norm", r"sam.layers.\3.layer_norm"),
    (_SAM + r"(blocks|layers)\.", "sam.layers."),
    (_SAM + r"patch_embed\.proj\.", "sam.patch_embed.projection."),
    (_SAM + r"neck\.0\.", "sam.neck.conv1."),
    (_SAM + r"neck\.1\.", "sam.neck.layer_norm1."),
    (_SAM + r"neck\.2\.", "sam.neck.conv2."),
    (_SAM + r"neck\.3\.", "sam.neck.layer_norm2."),
    (_SAM + r"net_2\.", "sam.proj.conv1."),
    (_SAM + r"net_3\.", "sam.proj.conv2."),
    (_SAM, "sam."),
    (r"(.*\.)?(qwen2_model\.model\.model|vision_tower\.vision_encoder)\.", "reader."),
    (
        r"(.*\.)?(qwen2_model\.query|vision_tower\.query)_(\d+)(_resolution)?\.",
        r"query_\3_resolution.",
    ),
    (r"(.*\.)?projector\.layers\.", "multi_modal_projector."),
    (r"view_seperator$", "view_separator"),
)
