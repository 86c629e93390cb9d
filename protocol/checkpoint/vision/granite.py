"""Read the vision towers of Granite 4 Vision, Granite for Docling, BLIP-2 and InstructBLIP, and Q-Formers."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from ...config.query_former import QueryFormerSpec
from ..config_fields import ConfigFields
from .fields import Sizes, check_factor, read_sizes
from .gemma import siglip
from .llava import llava
from .spec import VisionSpec, WindowQueries, WindowsSpec

_MAX_SIZE: Final = 1 << 16
_HEAD_SIZE: Final = 64
_NUM_OFFSETS: Final = 4

_Pairs = list[tuple[int, Annotated[int, msgspec.Meta(ge=0)]]]
_Layers = list[Annotated[int, msgspec.Meta(ge=0)]]
_LAYERS: Final = "a list of layers"


def query_former(queries: ConfigFields, read_size: int) -> QueryFormerSpec:
    """Return the Q-Former that a section of a config describes, whose rows have `read_size` elements."""
    size = queries.integer("hidden_size", 768, maximum=_MAX_SIZE)
    num_heads = queries.integer("num_attention_heads", 12)
    if size % num_heads:
        raise queries.wrong("hidden_size", f"a multiple of {num_heads} heads", size)
    return QueryFormerSpec(
        size=size,
        intermediate_size=queries.integer("intermediate_size", 3072, maximum=_MAX_SIZE),
        num_layers=queries.integer("num_hidden_layers", 12, maximum=1024),
        num_heads=num_heads,
        cross_attention_every=queries.integer("cross_attention_frequency", 2),
        read_size=read_size,
        activation=queries.text("hidden_act", "gelu"),
        norm_eps=queries.number("layer_norm_eps", 1e-12),
    )


_BLIP_SIZES: Final = Sizes(384, 16, 768, 3072, 12, 12, "gelu", 1e-5)
_BLIP2_SIZES: Final = Sizes(224, 14, 1408, 6144, 16, 39, "gelu")
_BLIP_NAMES: Final = (
    (r"\.self_attn\.projection\.", ".self_attn.out_proj."),
    (r"(embeddings\.position_embedding)$", r"\1.weight"),
)


def blip(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of BLIP, whose outputs cross attention reads."""
    sizes = read_sizes(vision, _BLIP_SIZES)
    return VisionSpec(
        **sizes,
        output_size=sizes["hidden_size"],
        projection="none",
        is_read=True,
        has_class_token=True,
        keeps_class_token=True,
        has_post_norm=True,
        tensor_names=_BLIP_NAMES,
    )


def blip2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of BLIP-2, whose embeddings are the outputs of a Q-Former that reads the patches."""
    sizes = read_sizes(vision, _BLIP2_SIZES)
    queries = fields.first_section("qformer_config")
    queries.require(
        "encoder_hidden_size", sizes["hidden_size"], ", as in vision_config", default=1408
    )
    queries.require("use_qformer_text_input", False)
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="former",
        has_class_token=True,
        keeps_class_token=True,
        has_post_norm=True,
        former=query_former(queries, sizes["hidden_size"]),
        num_queries=fields.integer("num_query_tokens", 32, maximum=4096),
        tensor_names=_BLIP_NAMES,
    )


def instruct_blip(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of InstructBLIP, whose Q-Former reads the text of the prompt, too."""
    spec = blip2(fields, vision, output_size)
    assert spec.former is not None
    queries = fields.first_section("qformer_config")
    former = replace(
        spec.former,
        max_text_tokens=queries.integer("max_position_embeddings", 512, maximum=_MAX_SIZE),
        vocab_size=queries.integer("vocab_size", 30_522),
    )
    names = (r"^(.*\.)?qformer\.embeddings\.layernorm\.", r"\1qformer.layernorm.")
    return replace(spec, former=former, tensor_names=(names, *spec.tensor_names))


def granite4_vision(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Granite 4 Vision, of whose embeddings each has a part for each of several decoder layers."""
    spec = llava(fields.with_values({"vision_feature_layer": -1}), vision, output_size)
    (num_layers,), side = spec.feature_layers, spec.image_size // spec.patch_size
    if spec.keeps_class_token:
        raise fields.wrong("vision_feature_select_strategy", "'default' for CLIP", "full")
    query_side, window_side = _rate(fields, side)
    pairs: list[tuple[int, int]] = fields.convert("deepstack_layer_map", [], _Pairs, _LAYERS)
    targets = fields.convert("spatial_target_layers", [12, 15, 18, 21], _Layers, _LAYERS)
    if len(targets) != _NUM_OFFSETS:
        raise fields.wrong("spatial_target_layers", f"{_NUM_OFFSETS} layers", targets)
    if 2 * query_side != window_side:
        raise fields.wrong("downsample_rate", "a half", fields.get("downsample_rate"))
    spatial = fields.get("spatial_vision_layer", -1)
    found = [
        (target, layer, WindowQueries(f"layerwise_projectors.{i}"))
        for i, (layer, target) in enumerate(pairs)
    ]
    found += [
        (target, spatial, WindowQueries(f"spatial_projectors.{i}", i))
        for i, target in enumerate(targets)
    ]
    if len({target for target, _, _ in found}) < len(found):
        raise fields.error("deepstack_layer_map and spatial_target_layers have a layer twice")
    for _, layer, _ in found:
        if type(layer) is not int or not (-num_layers <= layer <= num_layers and layer):
            raise fields.error(f"the vision tower has {num_layers} layers, and no layer {layer!r}")
    found.sort(key=lambda each: each[0])
    features = sorted({layer % (num_layers + 1) for _, layer, _ in found})
    queries = fields.first_section("qformer_config").with_defaults(
        num_hidden_layers=1, cross_attention_frequency=1
    )
    size = vision.multiple("hidden_size", _HEAD_SIZE, spec.hidden_size)
    queries = queries.with_values({"hidden_size": size, "num_attention_heads": size // _HEAD_SIZE})
    windows = WindowsSpec(
        query_side=query_side,
        window_side=window_side,
        queries=query_former(queries, size),
        parts=tuple(
            replace(each, feature=features.index(layer % (num_layers + 1)))
            for _, layer, each in found
        ),
        begins_with_zeros=found[0][0] > 0,
    )
    added_after = tuple(target - 1 for target, _, _ in found if target)
    return replace(
        spec,
        feature_layers=tuple(features),
        output_size=output_size * (1 + len(added_after)),
        projection="windows",
        windows=windows,
        added_after=added_after,
        has_newlines=True,
    )


def granite_docling(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Granite for Docling with its coarse path, which transformers takes by default."""
    vision = vision.with_defaults(image_size=512, patch_size=16)
    spec = siglip(vision, output_size, projection="connector")
    vision.require("out_hidden_size", output_size, ", the decoder's hidden_size", default=1024)
    (num_layers,) = spec.feature_layers
    factor = vision.integer("scale_factor", 4, maximum=64)
    check_factor(vision, "scale_factor", factor, spec.image_size // spec.patch_size)
    layers = vision.convert("deepstack_visual_indexes", [3, 7, 10], _Layers, _LAYERS)
    if layers != sorted(set(layers)) or max(layers, default=0) >= num_layers:
        raise vision.wrong("deepstack_visual_indexes", f"rising, below {num_layers}", layers)
    if output_size % 4:
        raise vision.wrong("out_hidden_size", "a multiple of 4", output_size)
    text = fields.first_section("text_config")
    return replace(
        spec,
        # The projection norms the last features.
        has_post_norm=False,
        feature_layers=(*(layer + 1 for layer in layers), num_layers),
        merge_factor=factor,
        output_size=output_size * (1 + len(layers)),
        output_scale=text.positive("embedding_multiplier", 12.0),
        added_after=tuple(range(len(layers))),
    )


def _rate(fields: ConfigFields, side: int) -> tuple[int, int]:
    """Return the numbers of queries and of patches along a side of a window."""
    text = fields.text("downsample_rate")
    found = re.fullmatch(r"([1-9]\d?)/([1-9]\d?)", text)
    if found is None or side % int(found[2]):
        needed = f"'a/b', where b divides the {side} patches of a side"
        raise fields.wrong("downsample_rate", needed, text)
    return int(found[1]), int(found[2])
