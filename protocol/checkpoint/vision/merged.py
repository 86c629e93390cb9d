"""Read the vision towers of OCR models, Hunyuan, MiniMax M3, Kimi, Isaac, LFM2-VL, LFM3-VL and VideoLLaMA 3."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from ..config_fields import ConfigFields
from .fields import head_count, image_and_patch_size, require_rotated_pairs
from .grid import GridVisionSpec


def paddleocr_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of PaddleOCR-VL or Keye-VL."""
    image_size, patch_size = image_and_patch_size(vision, 384, 14)
    return GridVisionSpec(
        **siglip_fields(vision, output_size, patch_size),
        merge_size=vision.integer("spatial_merge_size", 2, maximum=16),
        merger_eps=1e-5,
        position_side=image_size // patch_size,
        interpolation="bilinear centers",
        tensor_names=_PADDLE_NAMES,
    )


def keye1_5(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Keye-VL 1.5, which is that of PaddleOCR-VL with a norm of squares."""
    return replace(paddleocr_vl(fields, vision, output_size), merger_norm="squares")


def video_llama3(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of VideoLLaMA 3 (arXiv 2501.13106), which keeps all patches of an image.

    In frames of videos, each square of 2 x 2 patches becomes one output.
    """
    return GridVisionSpec(
        **siglip_fields(
            vision,
            output_size,
            vision.integer("patch_size", 16, maximum=256),
            *_SIGLIP_BASE,
        ),
        merge_size=1,
        merger_norm=None,
        merger_inner=output_size,
        has_axes=False,
        frame_merge=2,
        tensor_names=_VIDEO_LLAMA_NAMES,
    )


def dots_ocr(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of dots.ocr, whose norms have no means, except that of the projection."""
    vision.require_all(is_causal=False, post_norm=True, use_bias=False)
    vision.require("hidden_size", output_size, ", the hidden size of the decoder", default=1536)
    own = vision.with_values({"hidden_size": vision.integer("embed_dim", 1536)})
    patch_size = vision.integer("patch_size", 14, maximum=256)
    return GridVisionSpec(
        **merged_sizes(own, patch_size, 1536, 4224, 42, 12)
        | {"frames_per_patch": vision.integer("temporal_patch_size", 1, maximum=16)},
        merge_size=vision.integer("spatial_merge_size", 2, maximum=16),
        activation="silu",
        output_size=output_size,
        norm_kind="rms",
        norm_eps=vision.positive("rms_norm_eps", 1e-5),
        has_gate=True,
        has_patch_norm=True,
        has_biases=False,
        has_axes=False,
        merger_norm_kind="layer",
        merger_eps=1e-6,
        tensor_names=_DOTS_NAMES,
    )


def dots3_note(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of dots3-note: that of dots.ocr with normed heads, and with experts in its last layers.

    The config is that of its authors, or that of transformers, which does not say the adapter's kind.
    """
    vision.require_all(
        adapter_type="patch_merger",
        pre_pixel_shuffle=True,
        use_qk_norm=True,
        router_scoring_func="sigmoid",
        router_scale=1.0,
        router_scaling_factor=1.0,
        attention_bias=False,
        mlp_bias=False,
        hidden_act="silu",
    )
    vision.require("adapter_out_dim", output_size, ", the hidden size of the decoder", default=5120)
    size = vision.integer("embed_dim", vision.integer("hidden_size", 1536))
    own = vision.with_defaults(num_attention_heads=24)
    spec = dots_ocr(
        fields, own.with_values({"embed_dim": size, "hidden_size": output_size}), output_size
    )
    num_experts = _expert_counts(vision, spec.num_layers)
    return replace(
        spec,
        has_patch_bias=True,
        has_head_norms=True,
        num_experts=num_experts if any(num_experts) else (),
        num_chosen=vision.integer("num_experts_per_tok", int(vision.number("capacity_factor", 2))),
        expert_size=vision.integer("moe_intermediate_size", 2112),
        tensor_names=_DOTS3_NAMES,
    )


def _expert_counts(vision: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Return the number of experts of each layer, or 0."""
    kinds = vision.per_layer("mlp_layer_types", num_layers)
    if (counts := vision.get("pyramid_num_routed")) is None and kinds is not None:
        layers = vision.first_section("per_layer_config")
        default = vision.integer("num_local_experts", 64)
        counts = [
            layers.first_section(str(i)).integer("num_local_experts", default)
            if kind == "sparse"
            else 0
            for i, kind in enumerate(kinds)
        ]
    if counts is None:
        counts = [0] * 25 + [*range(4, 65, 4), 64]
    if not isinstance(counts, list) or [type(each) for each in counts] != [int] * num_layers:
        raise vision.wrong("pyramid_num_routed", f"{num_layers} integers", counts)
    return tuple(max(each, 0) for each in counts)


def hunyuan_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Hunyuan-OCR."""
    image_size = vision.integer("max_image_size", 2048, maximum=1 << 16)
    patch_size = vision.integer("patch_size", 16, maximum=256)
    mode = vision.choice("interpolate_mode", ("bilinear", "bicubic"), "bilinear")
    return GridVisionSpec(
        **merged_sizes(vision, patch_size) | {"has_final_norm": False},
        merge_size=vision.integer("spatial_merge_size", 2, maximum=16),
        activation=vision.text("hidden_act", "gelu"),
        output_size=output_size,
        norm_eps=vision.positive("rms_norm_eps", 1e-5),
        has_joined_qkv=False,
        rotary=None,
        position_side=image_size // patch_size,
        has_class_position=True,
        interpolation="centers" if mode == "bicubic" else "bilinear centers",
        newlines="framed",
        tensor_names=_HUNYUAN_NAMES,
    )


def hy_v4_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Hy4-VL, which is like that of Hunyuan-OCR with a smaller projection."""
    sizes = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 40}
    spec = hunyuan_vl(fields, vision.with_defaults(**sizes), output_size)
    return replace(spec, newlines="plain", side_offset=0.1)


def minimax_m3(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of MiniMax M3."""
    patch_size = vision.integer("patch_size", 14, maximum=256)
    sizes = merged_sizes(vision, patch_size, 1280, 5120, 32)
    sizes |= {"has_patch_bias": False, "has_final_norm": False}
    sizes["frames_per_patch"] = vision.integer("temporal_patch_size", 2, maximum=16)
    return GridVisionSpec(
        **sizes,
        merge_size=vision.integer("spatial_merge_size", 2, maximum=16),
        activation=vision.text("hidden_act", "gelu"),
        output_size=output_size,
        norm_eps=vision.positive("layer_norm_eps", 1e-5),
        has_patch_norm=True,
        has_joined_qkv=False,
        rotary="thirds",
        has_axes=False,
        merger_inner=fields.integer("projector_hidden_size", 6144),
        projects_patches=True,
        tensor_names=_MINIMAX_NAMES,
    )


def kimi_k25(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Kimi-VL or Kimi K2.5 for images (MoonViT). Videos are not supported."""
    vision = vision.with_defaults(
        **{
            name: vision.get(old_name)
            for name, old_name in _KIMI_FIELDS.items()
            if vision.get(old_name) is not None
        }
    )
    side = vision.integer("pos_emb_height", 64, maximum=1024)
    vision.require("pos_emb_width", side, ", as pos_emb_height")
    merge = vision.get("merge_kernel_size", [2, 2])
    if not isinstance(merge, list) or len(merge) != 2 or merge[0] != merge[1]:
        raise vision.wrong("merge_kernel_size", "two equal numbers", merge)
    merge_size = vision.with_values({"merge_kernel_size": merge[0]})
    return GridVisionSpec(
        **merged_sizes(vision, vision.integer("patch_size", 14, maximum=256)),
        merge_size=merge_size.integer("merge_kernel_size", maximum=16),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        output_size=output_size,
        norm_eps=1e-5,
        merger_eps=fields.positive("projection_layer_norm_eps", 1e-5),
        rotary="alternating",
        has_axes=False,
        position_side=side,
        has_square_positions=True,
        interpolation="centers",
        tensor_names=_KIMI_NAMES,
    )


def lfm2_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of LFM2-VL, which is SigLIP 2 (arXiv 2502.14786) for images of any size."""
    fields.require("projector_hidden_act", "gelu")
    return GridVisionSpec(
        **siglip_fields(vision, output_size, vision.integer("patch_size", 16), *_SIGLIP_BASE),
        merge_size=fields.integer("downsample_factor", 2, maximum=16),
        merger_eps=1e-5,
        merger_norm="squares" if fields.boolean("projector_use_layernorm", True) else None,
        merger_inner=fields.integer("projector_hidden_size", 2560),
        has_merger_biases=fields.boolean("projector_bias", True),
        patch_layout="pixels",
        rotary=None,
        has_axes=False,
        position_side=vision.square_side("num_patches", 256, maximum=1 << 20),
        interpolation="antialiased",
        tensor_names=_LFM2_NAMES,
    )


def phi4_siglip(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Phi-4-reasoning-vision, that of LFM2-VL with an embedding for each patch."""
    own = fields.with_defaults(downsample_factor=1, projector_use_layernorm=False)
    # The features are those of the last layer but one, before the last norm.
    return replace(lfm2_vl(own, vision, output_size), has_final_norm=False)


def cosmos3_edge(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Cosmos 3 Edge, which is SigLIP 2 like that of LFM2-VL."""
    return GridVisionSpec(
        **siglip_fields(vision, output_size, vision.integer("patch_size", 16)),
        merge_size=vision.integer("spatial_merge_size", 2, maximum=16),
        merger_eps=1e-6,
        merger_inner=fields.integer("projector_hidden_size", 11520),
        patch_layout="pixels",
        rotary=None,
        position_side=vision.square_side("num_patches", 256, maximum=1 << 20),
        interpolation="antialiased",
        tensor_names=(
            *SIGLIP_NAMES,
            # Transformers saves the tower with the names of the decoder's tensors.
            (r"(visual\.blocks\..*)\.attn\.to_([qkv])\.", r"\1.attn.\2_proj."),
            (r"(visual\.blocks\..*)\.mlp\.up_proj\.", r"\1.mlp.fc1."),
            (r"(visual\.blocks\..*)\.mlp\.down_proj\.", r"\1.mlp.fc2."),
            (r"projector\.norm\.", "visual.merger.norm."),
            (r"projector\.linear_fc", "visual.merger.fc"),
        ),
    )


def isaac(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Isaac, which is SigLIP 2 like that of LFM2-VL."""
    merge, size = vision.integer("pixel_shuffle_scale_factor", 1, maximum=16), 768
    return GridVisionSpec(
        **siglip_fields(vision, output_size, vision.integer("patch_size", 16), *_SIGLIP_BASE),
        merge_size=merge,
        merger_norm=None,
        merger_inner=4 * merge**2 * vision.integer("hidden_size", size),
        merger_activation="silu",
        has_merger_biases=False,
        patch_layout="pixels",
        rotary=None,
        position_side=vision.square_side("num_patches", 256, maximum=1 << 20),
        interpolation="antialiased",
        tensor_names=(
            (r"(model\.)?vision_embedding\.0\.", "visual."),
            *SIGLIP_NAMES,
            (r"(model\.)?vision_embedding\.1\.", "visual.merger.fc1."),
            (r"(model\.)?vision_embedding\.3\.", "visual.merger.fc2."),
        ),
    )


def lfm3_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of LFM3-VL, whose layers have convolutions or attention."""
    rope = vision.first_section("rope_parameters").with_defaults(rope_theta=1_000_000.0)
    vision = vision.with_values({"rope_parameters": rope.config})
    sizes = merged_sizes(vision, vision.integer("patch_size", 16, maximum=256), 1024, 2560, 14)
    sizes |= {"has_patch_bias": False, "has_final_norm": False}
    sizes["frames_per_patch"] = vision.integer("temporal_patch_size", 2, maximum=16)
    num_layers = sizes["num_layers"]
    kinds = vision.per_layer("layer_types", num_layers)
    if kinds is None:
        kinds = ["conv" if i < 2 or i % 2 else "full_attention" for i in range(num_layers)]
    if not set(kinds) <= {"conv", "full_attention"}:
        raise vision.wrong("layer_types", "'conv' or 'full_attention' for each layer", kinds)
    conv_size = vision.integer("conv_kernel_size", 3, maximum=255)
    if conv_size % 2 == 0:
        raise vision.wrong("conv_kernel_size", "an odd number", conv_size)
    fields.require("projector_hidden_act", "gelu")
    return GridVisionSpec(
        **sizes,
        merge_size=vision.integer("spatial_merge_size", 2, maximum=16),
        activation="silu",
        output_size=output_size,
        norm_kind="rms",
        norm_eps=vision.positive("norm_eps", 1e-5),
        has_gate=True,
        has_patch_norm=True,
        has_biases=False,
        has_head_norms=True,
        patch_layout="channels",
        has_joined_qkv=False,
        num_kv_heads=vision.divisor("num_key_value_heads", sizes["num_heads"], 8),
        conv_layers=tuple(i for i, kind in enumerate(kinds, 1) if kind == "conv"),
        conv_size=conv_size,
        has_axes=False,
        merger_norm_kind="layer",
        merger_eps=1e-6,
        merger_inner=fields.integer("projector_hidden_size", 4096),
        has_merger_biases=fields.boolean("projector_bias", True),
        tensor_names=_LFM3_NAMES,
    )


def siglip_fields(
    vision: ConfigFields, output_size: int, patch_size: int, *sizes: int
) -> dict[str, Any]:
    """Return what towers like SigLIP have in common, as keyword arguments. `sizes` are defaults of `merged_sizes`."""
    return merged_sizes(vision, patch_size, *sizes) | {
        "activation": vision.text("hidden_act", "gelu_pytorch_tanh"),
        "output_size": output_size,
        "norm_eps": vision.positive("layer_norm_eps", 1e-6),
        "has_joined_qkv": False,
    }


def merged_sizes(
    vision: ConfigFields,
    patch_size: int,
    hidden_size: int = 1152,
    intermediate_size: int = 4304,
    num_layers: int = 27,
    num_heads: int = 16,
) -> dict[str, Any]:
    """Return the sizes of a tower whose config has the usual names, with these defaults, as keyword arguments."""
    heads = head_count(vision, hidden_size, num_heads)
    size = vision.integer("hidden_size", hidden_size)
    require_rotated_pairs(vision, size, heads)
    rope = vision.first_section("rope_parameters")
    layers = vision.with_defaults(num_hidden_layers=num_layers)
    return {
        "patch_size": patch_size,
        "frames_per_patch": 1,
        "hidden_size": size,
        "intermediate_size": vision.integer("intermediate_size", intermediate_size),
        "num_heads": heads,
        "num_layers": layers.layer_count("num_hidden_layers"),
        "rope_theta": rope.positive("rope_theta", 10_000.0, above=1),
        "has_patch_bias": True,
        "has_final_norm": True,
    }


_SIGLIP_BASE: Final = (768, 3072, 12, 12)
"""The sizes of SigLIP's smallest tower, in the order of `merged_sizes`."""

_DOTS_NAMES: Final = (
    (r"vision_tower\.patch_embed\.patchifier\.proj\.", "visual.patch_embed.proj."),
    (r"vision_tower\.patch_embed\.patchifier\.norm\.", "visual.patch_norm."),
    (r"vision_tower\.post_trunk_norm\.", "visual.final_norm."),
    (r"vision_tower\.", "visual."),
    (r"(visual\.blocks\..*\.mlp)\.fc1\.", r"\1.gate_proj."),
    (r"(visual\.blocks\..*\.mlp)\.fc2\.", r"\1.down_proj."),
    (r"(visual\.blocks\..*\.mlp)\.fc3\.", r"\1.up_proj."),
    (r"visual\.merger\.ln_q\.", "visual.merger.norm."),
    (r"visual\.merger\.mlp\.0\.", "visual.merger.fc1."),
    (r"visual\.merger\.mlp\.2\.", "visual.merger.fc2."),
)
_DOTS3_NAMES: Final = (
    (r"^(model\.)?vision_encoder\.", "vision_tower."),
    (r"vision_tower\.patch_embed\.(proj|norm)\.", r"vision_tower.patch_embed.patchifier.\1."),
    (r"(vision_tower\.blocks\.\d+\.norm)_", r"\1"),
    (r"vision_tower\.adapter\.", "vision_tower.merger."),
    (r"(\.mlp\.experts\.\d+)\.fc1\.", r"\1.gate_proj."),
    (r"(\.mlp\.experts\.\d+)\.fc2\.", r"\1.down_proj."),
    (r"(\.mlp\.experts\.\d+)\.fc3\.", r"\1.up_proj."),
    *_DOTS_NAMES,
)
_KIMI_FIELDS: Final = {
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_attention_heads": "vt_num_attention_heads",
    "num_hidden_layers": "vt_num_hidden_layers",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
}
"""The names of fields in published configs, by their names in transformers."""

_HUNYUAN_NAMES: Final = (
    (r"(model\.)?(vit|vision_tower)\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"(model\.)?(vit|vision_tower)\.embeddings\.position_embedding\.", "visual.pos_embed."),
    (r"(model\.)?(vit|vision_tower)\.layers\.", "visual.blocks."),
    (r"(model\.)?(vit|vision_tower)\.(perceive|patch_merger)\.", "visual.merger."),
    (r"(visual\.blocks\..*)\.(input_layernorm|layer_norm1)\.", r"\1.norm1."),
    (r"(visual\.blocks\..*)\.(post_attention_layernorm|layer_norm2)\.", r"\1.norm2."),
    (r"(visual\.blocks\..*)\.self_attn\.o_proj\.", r"\1.attn.proj."),
    (r"(visual\.blocks\..*)\.self_attn\.", r"\1.attn."),
    (r"(visual\.blocks\..*)\.dense_h_to_4h\.", r"\1.fc1."),
    (r"(visual\.blocks\..*)\.dense_4h_to_h\.", r"\1.fc2."),
    (r"visual\.merger\.norm\.", "visual.merger.before_rms."),
    (r"visual\.merger\.(proj\.0|proj_conv)\.", "visual.merger.square."),
    (r"visual\.merger\.(proj\.2|proj_out)\.", "visual.merger.proj."),
)
_MINIMAX_NAMES: Final = (
    (
        r"(model\.)?vision_tower\.(vision_model\.)?embeddings\.(patch_embedding|proj)\.",
        "visual.patch_embed.proj.",
    ),
    (r"(model\.)?vision_tower\.(vision_model\.encoder\.)?layers\.", "visual.blocks."),
    (r"(model\.)?vision_tower\.(vision_model\.)?pre_layrnorm\.", "visual.patch_norm."),
    (r"(visual\.blocks\..*)\.layer_norm", r"\1.norm"),
    (r"(visual\.blocks\..*)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"(visual\.blocks\..*)\.self_attn\.", r"\1.attn."),
    (
        r"(model\.)?(patch_merge_mlp\.linear|multi_modal_projector\.merge_linear)_1\.",
        "visual.merger.fc3.",
    ),
    (
        r"(model\.)?(patch_merge_mlp\.linear|multi_modal_projector\.merge_linear)_2\.",
        "visual.merger.fc4.",
    ),
    (r"(model\.)?multi_modal_projector\.linear_", "visual.merger.fc"),
)
_KIMI_NAMES: Final = (
    (r"vision_tower\.encoder\.", "vision_tower."),
    (r"vision_tower\.patch_embed\.pos_emb\.", "vision_tower.pos_embed."),
    (r"vision_tower\.final_layernorm\.", "vision_tower.final_norm."),
    (r"(vision_tower\..*)\.norm1\.", r"\1.norm2."),
    (r"(vision_tower\..*)\.norm0\.", r"\1.norm1."),
    (r"(vision_tower\..*)\.mlp\.fc1\.", r"\1.mlp.fc2."),
    (r"(vision_tower\..*)\.mlp\.fc0\.", r"\1.mlp.fc1."),
    (r"(vision_tower\..*)\.wqkv\.", r"\1.attn.qkv."),
    (r"(vision_tower\..*)\.wo\.", r"\1.attn.proj."),
    (r"(model\.)?(mm|multi_modal)_projector\.pre_norm\.", "vision_tower.merger.norm."),
    (r"multi_modal_projector\.linear_", "vision_tower.merger.fc"),
    (r"mm_projector\.proj\.0\.", "vision_tower.merger.fc1."),
    (r"mm_projector\.proj\.2\.", "vision_tower.merger.fc2."),
)
SIGLIP_NAMES: Final = (
    (r"(vision_tower|visual)\.vision_model\.", r"\1."),
    (r"(vision_tower|visual)\.embeddings\.patch_embedding\.", r"\1.patch_embed.proj."),
    (r"(vision_tower|visual)\.embeddings\.position_embedding\.", r"\1.pos_embed."),
    (r"(vision_tower|visual)\.post_layernorm\.", r"\1.final_norm."),
    (r"(vision_tower|visual)\.encoder\.layers\.", r"\1.blocks."),
    (r"((vision_tower|visual)\.blocks\..*)\.layer_norm", r"\1.norm"),
    (r"((vision_tower|visual)\.blocks\..*)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"((vision_tower|visual)\.blocks\..*)\.self_attn\.", r"\1.attn."),
)
_LFM2_NAMES: Final = (
    # Phi-4-reasoning-vision has LLaVA's names.
    (r"^model\.vision_tower\.vision_tower\.", "vision_tower."),
    (r"^model\.mm_projector\.0\.", "vision_tower.merger.fc1."),
    (r"^model\.mm_projector\.2\.", "vision_tower.merger.fc2."),
    *SIGLIP_NAMES,
    (r"multi_modal_projector\.layer_norm\.", "vision_tower.merger.norm."),
    (r"multi_modal_projector\.linear_", "vision_tower.merger.fc"),
)
_LFM3_NAMES: Final = (
    (r"(model\.)?vision_tower\.(patch_embed|patchifier)\.", "visual.patch_embed.proj."),
    (r"(model\.)?vision_tower\.embedding_norm\.", "visual.patch_norm."),
    (r"(model\.)?vision_tower\.layers\.", "visual.blocks."),
    (r"(visual\.blocks\..*)\.operator_norm\.", r"\1.norm1."),
    (r"(visual\.blocks\..*)\.ffn_norm\.", r"\1.norm2."),
    (r"(visual\.blocks\..*)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"(visual\.blocks\..*)\.self_attn\.", r"\1.attn."),
    (r"(visual\.blocks\..*\.[qk])_layernorm\.", r"\1_norm."),
    (r"(visual\.blocks\..*)\.feed_forward\.w1\.", r"\1.mlp.gate_proj."),
    (r"(visual\.blocks\..*)\.feed_forward\.w2\.", r"\1.mlp.down_proj."),
    (r"(visual\.blocks\..*)\.feed_forward\.w3\.", r"\1.mlp.up_proj."),
    (r"(model\.)?multi_modal_projector\.layer_norm\.", "visual.merger.norm."),
    (r"(model\.)?multi_modal_projector\.linear_", "visual.merger.fc"),
)
_PADDLE_NAMES: Final = (
    *SIGLIP_NAMES,
    (r"(projector|mlp_AR)\.pre_norm\.", "visual.merger.norm."),
    (r"(projector|mlp_AR)\.linear_", "visual.merger.fc"),
)
_VIDEO_LLAMA_NAMES: Final = (
    (r"(model\.)?vision_model\.", "visual."),
    *SIGLIP_NAMES,
    (r"(model\.)?projector\.readout\.0\.", "visual.merger.fc1."),
    (r"(model\.)?projector\.readout\.2\.", "visual.merger.fc2."),
)
