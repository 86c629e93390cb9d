"""Read the vision towers of Muse Glimmer, Youtu-VL, Inkling 2, openPangu-VL and of NVIDIA's models."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ..config_fields import ConfigFields
from ..field_names import text_section
from .grid import GridVisionSpec, qwen2_5_vl, read_layers
from .merged import SIGLIP_NAMES, kimi_k25, merged_sizes, siglip_fields
from .spec import MAX_SIDE, PageSpec

_NORM_EPS: Final = 1e-5


def muse(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Muse Glimmer or Muse Spark. The decoder norms its outputs, like the embeddings of tokens."""
    patch_size = vision.integer("patch_size", 14, maximum=256)
    sizes = merged_sizes(vision, patch_size, 1536, 8960, 50)
    num_layers = sizes["num_layers"]
    types = vision.per_layer("layer_types", num_layers)
    if types is None:
        is_full = [i % 4 == 3 or i == num_layers - 1 for i in range(num_layers)]
    else:
        if not set(types) <= {"full_attention", "window_attention"}:
            raise vision.wrong("layer_types", "'full_attention' or 'window_attention' each", types)
        is_full = [kind == "full_attention" for kind in types]
    side = vision.integer("pos_emb_height", 32, maximum=1024)
    vision.require("pos_emb_width", side, ", as pos_emb_height", default=32)
    merge_size = vision.integer("merge_size", 2, maximum=16)
    if side % merge_size:
        raise vision.wrong("pos_emb_height", f"a multiple of merge_size {merge_size}", side)
    fields.require("projector_hidden_act", "gelu")
    sizes["frames_per_patch"] = vision.integer("patch_temporal", 2, maximum=16)
    return GridVisionSpec(
        **sizes | {"has_patch_bias": False},
        merge_size=merge_size,
        activation=vision.text("hidden_act", "gelu"),
        output_size=output_size,
        norm_eps=_NORM_EPS,
        norms_positions=True,
        position_side=side,
        interpolation="swapped sides",
        outer_eps=vision.positive("layer_norm_eps", _NORM_EPS),
        has_joined_qkv=False,
        rotary="columns first",
        has_axes=False,
        patch_layout="frames",
        merger_norm=None,
        merger_inner=fields.integer("projector_hidden_size", 4096),
        has_third_matrix=True,
        window_size=side * patch_size,
        full_layers=tuple(i for i, each in enumerate(is_full, 1) if each),
        tensor_names=_NAMES,
    )


def youtu_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Youtu-VL (arXiv 2601.19798), a SigLIP 2 whose patches are rotated."""
    vision.require("out_hidden_size", output_size, ", as hidden_size of the decoder")
    patch_size = vision.integer("patch_size", 16, maximum=256)
    sizes = siglip_fields(vision, output_size, patch_size)
    merge_size = vision.integer("spatial_merge_size", 2, maximum=16)
    window_size = vision.integer("window_size", 256)
    if window_size < patch_size * merge_size:
        needed = f"at least {patch_size * merge_size}, the pixels of an embedding"
        raise vision.wrong("window_size", needed, window_size)
    return GridVisionSpec(
        **sizes,
        merge_size=merge_size,
        has_axes=False,
        patch_layout="pixels",
        merger_norm_kind="rms",
        merger_eps=1e-6,
        window_size=window_size,
        full_layers=read_layers(
            vision, "fullatt_block_indexes", sizes["num_layers"], [7, 15, 23, 26]
        ),
        tensor_names=_YOUTU_NAMES,
    )


def inkling2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Inkling 2. The margins of its images have a value that pixels cannot have."""
    vision.require("num_channels", 3)
    vision.require("text_hidden_size", output_size, ", as hidden_size of the decoder")
    rope = vision.first_section("rope_parameters")
    rope.require("rope_type", "axial")
    # Published configs have other names.
    patch_size = vision.integer("patch_size", vision.integer("native_patch_size", 20), maximum=256)
    merge_size = vision.integer(
        "spatial_merge_size", vision.integer("adapter_merge_size", 2), maximum=16
    )
    vision.require("hidden_act", "gelu")
    inner = int(vision.integer("hidden_size", 1024) * vision.positive("mlp_ratio", 4.0))
    sizes = merged_sizes(vision, patch_size, 1024, inner, 23)
    return GridVisionSpec(
        **sizes | {"has_patch_bias": False, "has_final_norm": False},
        merge_size=merge_size,
        activation="gelu",
        output_size=output_size,
        norm_eps=vision.positive("layer_norm_eps", 1e-5),
        norms_positions=True,
        position_side=vision.integer("posemb_grid_size", 32, maximum=1024),
        interpolation="bilinear centers",
        has_joined_qkv=False,
        rotary="pairs",
        has_axes=False,
        patch_layout="pixels",
        merger_norm=None,
        merger_inner=vision.integer("projection_hidden_dim", 4096),
        has_merger_biases=vision.boolean("projector_bias", False),
        has_class_token=True,
        has_layer_scales=True,
        margin=-1.0,
        tensor_names=_INKLING_NAMES,
    )


def nemotron_omni(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Nemotron Omni, a C-RADIO (arXiv 2312.06709). Published configs omit its usual sizes."""
    patch_size = vision.integer("patch_size", 16, maximum=256)
    ratio = fields.positive("downsample_ratio", 0.5)
    if ratio not in (1.0, 0.5, 0.25):
        raise fields.wrong("downsample_ratio", "0.25, 0.5 or 1", ratio)
    vision.require("use_swiglu_ffn", False, default=False)
    is_older = fields.get("model_type") == "NemotronH_Nano_VL_V2"
    frames = fields.integer("video_temporal_patch_size", 2, minimum=2, maximum=16)
    size = vision.integer("hidden_size", 1280)
    fields.require("vision_hidden_size", size, ", as in vision_config", default=size)
    fields.require("vit_hidden_size", size, ", as in vision_config", default=size)
    inner = int(size * vision.positive("mlp_ratio", 4.0))
    own = vision.with_values({"intermediate_size": inner})
    decoder = text_section(fields) or fields
    return GridVisionSpec(
        **merged_sizes(own, patch_size, 1280, inner, 32)
        | {
            "has_patch_bias": False,
            # Megatron adds this norm to towers whose decoder also predicts later tokens.
            "has_final_norm": decoder.integer("num_nextn_predict_layers", 0, minimum=0) > 0,
        },
        merge_size=round(1 / ratio),
        frames_per_tubelet=0 if is_older else frames,
        activation=vision.text("hidden_act", "gelu"),
        output_size=output_size,
        norm_eps=vision.positive("layer_norm_eps", 1e-6),
        rotary=None,
        has_axes=False,
        patch_layout="channels",
        position_side=vision.integer("max_img_size", 2048, maximum=1 << 15) // patch_size,
        interpolation="cropped",
        has_registers=True,
        merger_norm="squares",
        merger_norm_kind="rms",
        merger_eps=1e-5,
        merger_activation="relu2",
        merger_inner=fields.integer("projector_hidden_size", 4096),
        has_merger_biases=False,
        tensor_names=_RADIO_NAMES,
    )


def nemotron_parse(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Nemotron Parse, a C-RADIO that reads whole pages."""
    radio = nemotron_omni(
        fields.with_values({"downsample_ratio": 1.0, "text_config": {}}), vision, output_size
    )
    height, width = vision.integers("page_size")
    page = PageSpec(height, width, tuple(vision.integers("summary")))
    least = radio.patch_size * page.columns_per_output
    if not all(least <= side <= MAX_SIDE for side in (height, width)):
        raise vision.wrong("page_size", f"sides from {least} to {MAX_SIDE} pixels", [height, width])
    return replace(
        radio, frames_per_tubelet=0, page=page, tensor_names=(*_PARSE_NAMES, *_RADIO_NAMES)
    )


def openpangu_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of openPangu-VL: Qwen2.5-VL's, of which several layers are projected and added up."""
    middle_size = vision.integer("out_hidden_size", 3584)
    spec = qwen2_5_vl(fields, vision, middle_size)
    chosen = vision.get("mm_unit_vision_select_layer", [-1, -3])
    if not (
        isinstance(chosen, list)
        and chosen
        and all(type(i) is int and -spec.num_layers <= i < 0 for i in chosen)
        and max(chosen) == -1
    ):
        needed = f"numbers from -{spec.num_layers} to -1, which is one of them"
        raise vision.wrong("mm_unit_vision_select_layer", needed, chosen)
    return replace(
        spec,
        output_size=output_size,
        middle_size=middle_size,
        norm_eps=vision.positive("rms_norm_eps", 1e-6),
        has_gate=spec.activation == "silu",
        has_final_norm=True,
        summed_layers=tuple(spec.num_layers + 1 + i for i in sorted(chosen, reverse=True)),
        tensor_names=_PANGU_NAMES,
    )


def locate_anything(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of LocateAnything, which is Kimi-VL's with a projection that norms whole squares."""
    fields.require("mlp_connector_layers", 2)
    spec = kimi_k25(fields, vision, output_size)
    return replace(
        spec,
        merger_norm="squares",
        merger_inner=output_size,
        tensor_names=(
            (r"^vision_model\.", "vision_tower."),
            *spec.tensor_names,
            (r"^mlp1\.0\.", "vision_tower.merger.norm."),
            (r"^mlp1\.1\.", "vision_tower.merger.fc1."),
            (r"^mlp1\.3\.", "vision_tower.merger.fc2."),
        ),
    )


def nemotron_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Llama Nemotron Nano VL: that of Nemotron Omni with another projection."""
    own = vision.with_defaults(
        max_img_size=vision.first_section("args").get("cpe_max_size", vision.get("max_resolution"))
    )
    fields.require("ps_version", "v2")
    return replace(
        nemotron_omni(fields.with_values({"model_type": "NemotronH_Nano_VL_V2"}), own, output_size),
        merger_norm_kind="layer",
        merger_activation="gelu",
        has_merger_biases=True,
    )


_NAMES: Final = (
    (r"vision_tower\.patch_embedder\.patch_embedding\.", "vision_tower.patch_embed.proj."),
    (r"vision_tower\.patch_embedder\.position_embedding_table\.", "vision_tower.pos_embed."),
    (r"vision_tower\.ln_pre\.", "vision_tower.patch_norm."),
    (r"vision_tower\.ln_post\.", "vision_tower.final_norm."),
    (r"vision_tower\.layers\.", "vision_tower.blocks."),
    (r"vision_adapter\.", "vision_tower.merger."),
    (r"vision_projection\.", "vision_tower.merger.fc3."),
)
_PANGU_NAMES: Final = (
    (r"^(model\.)?visual\.", "visual."),
    (r"^visual\.final_layernorm\.", "visual.final_norm."),
    (r"^visual\.vision_projection\.fc1\.", "visual.summed_project."),
    (r"^visual\.merger\.(\d+)\.ln_q\.", r"visual.summed_mergers.\1.norm."),
    (r"^visual\.merger\.(\d+)\.mlp\.0\.", r"visual.summed_mergers.\1.fc1."),
    (r"^visual\.merger\.(\d+)\.mlp\.2\.", r"visual.summed_mergers.\1.fc2."),
)
_YOUTU_NAMES: Final = (
    (r"^siglip2\.", "visual."),
    *SIGLIP_NAMES,
    (r"^merger\.ln_q\.", "visual.merger.norm."),
    (r"^merger\.mlp\.0\.", "visual.merger.fc1."),
    (r"^merger\.mlp\.2\.", "visual.merger.fc2."),
)
_INKLING_NAMES: Final = (
    (r"^model\.(visual|vision_tower)\.(backbone\.)?", "visual."),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding(\.weight)?$", "visual.pos_embed.weight"),
    (r"^visual\.embeddings\.", "visual."),
    (r"^visual\.(ln_pre|pre_layernorm)\.", "visual.patch_norm."),
    (r"^visual\.layers\.", "visual.blocks."),
    (r"^(visual\.blocks\..*)\.(ln_1|layernorm_before)\.", r"\1.norm1."),
    (r"^(visual\.blocks\..*)\.(ln_2|layernorm_after)\.", r"\1.norm2."),
    (r"^(visual\.blocks\..*)\.mlp\.c_fc\.", r"\1.mlp.fc1."),
    (r"^(visual\.blocks\..*)\.mlp\.c_proj\.", r"\1.mlp.fc2."),
    (r"^(visual\.blocks\..*)\.ls_([12])\.gamma$", r"\1.lambda_\2"),
    (r"^(visual\.blocks\..*)\.(self_)?attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(visual\.blocks\..*)\.self_attn\.", r"\1.attn."),
    (r"^visual\.(proj_in|merger\.linear_1)\.", "visual.merger.fc1."),
    (r"^visual\.(proj_out|merger\.linear_2)\.", "visual.merger.fc2."),
)
_PARSE_NAMES: Final = (
    (r"^encoder\.model_encoder\.", "vision_model."),
    (r"^encoder\.(conv[12]|layer_norm[123]|sum_proj)\.", r"visual.merger.\1."),
)
_RADIO_NAMES: Final = (
    (
        r"^vision_model\.radio_model\.model\.patch_generator\.video_embedder\.",
        "visual.patch_embed.tubelets.",
    ),
    (r"^vision_model\.radio_model\.model\.patch_generator\.embedder\.", "visual.patch_embed.proj."),
    (r"^vision_model\.radio_model\.model\.patch_generator\.pos_embed$", "visual.pos_embed.weight"),
    (
        r"^vision_model\.radio_model\.model\.patch_generator\.cls_token\.token$",
        "visual.registers.weight",
    ),
    (r"^vision_model\.radio_model\.model\.", "visual."),
    (r"^(vision_projector\.)?vision_final_layernorm\.", "visual.final_norm."),
    (r"^(mlp1\.0|multi_modal_projector\.layer_norm)\.", "visual.merger.norm."),
    (r"^(mlp1\.1|multi_modal_projector\.linear_1)\.", "visual.merger.fc1."),
    (r"^(mlp1\.3|multi_modal_projector\.linear_2)\.", "visual.merger.fc2."),
)
