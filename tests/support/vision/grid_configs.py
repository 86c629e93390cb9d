"""Configs of tiny models that read images of any size, and whose decoder has one position a token."""

from __future__ import annotations

from typing import Any

import transformers
from support.families import SMALL
from support.families.experts import BLOCKS_OF_KEYS, LATENT, WITH_EXPERTS
from support.families.multimodal import AUDIO_SIZES, MULTIMODAL
from support.families.recurrent import RECURRENT
from support.gguf.saved import LIKE_OTHER_LAYERS

PATCH, IMAGE_TOKEN = 4, 96
KIMI = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
}
EXAONE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "out_hidden_size": 48,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "depth": 3,
    "patch_size": PATCH,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
SIGLIP = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "num_patches": 36,
}
MINICPM = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "patch_size": PATCH,
    "image_size": 28,
}
MUSE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "layer_types": ["window_attention", "full_attention", "window_attention"],
}
DEEPSEEK = {
    "sam_config": {
        "hidden_size": 24,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 256,
        "patch_size": PATCH,
        "window_size": 10,
        "global_attn_indexes": [1],
        "mlp_dim": 40,
        "downsample_channels": [20, 48],
    },
    "encoder_config": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
SQUARE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "image_size": 24,
}
RADIO = {
    "hidden_size": 48,
    "mlp_ratio": 1.5,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "max_img_size": 24,
    "num_cls_tokens": 2,
    "num_registers": 1,
    "video_temporal_patch_size": 2,
}
RADIO_PROCESSOR = {
    "patch_size": PATCH,
    "min_num_patches": 16,
    "max_num_patches": 400,
    "norm_mean": [0.5] * 3,
    "norm_std": [0.5] * 3,
}
DOTS = {
    "embed_dim": 48,
    "adapter_in_dim": 48,
    "adapter_out_dim": SMALL["hidden_size"],
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "patch_size": PATCH,
    "pyramid_num_routed": [-1, 3, -1, 5],
}
DOTS_AUDIO = {
    "downsample_hidden_size": 12,
    "whisper_adapter_in_dim": 48,
    "whisper_adapter_out_dim": SMALL["hidden_size"],
    "whisper_config": {
        "d_model": 48,
        "encoder_attention_heads": 4,
        "encoder_layers": 2,
        "encoder_ffn_dim": 40,
        "num_mel_bins": 16,
        "max_source_positions": 300,
    },
}
JANUS_IMAGES = {
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "latent_channels": 32,
    "num_embeddings": 16,
    "projection_dim": 48,
    "image_token_embed_dim": 48,
}
INKLING_MODELS = ("inkling2", "inkling2_loop")
INKLING = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "posemb_grid_size": 6,
    "projection_hidden_dim": 56,
}
SQUARE_MODELS = (
    "janus",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "ovis2",
    "got_ocr2",
    "pp_chart2table",
)
PAIRED = ("exaone4_5", "opencua", "hyperclovax_vision_v2", "minimax_m3_vl")
"""Models whose patches have two frames."""
MUSE_MODELS = ("muse_glimmer", "muse_spark")
MINICPM_MODELS = ("minicpmv4_6", "minicpm_ocr", "minicpmv4_7")
OVIS_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
OVIS_MARK_IDS = [90, 91, 92, 93, 95]
MARKS = {"<image_start>": 90, "<image_end>": 91, "<slice_start>": 92, "<slice_end>": 93, "\n": 94}
SIZES = {"deepseek_ocr2": ((30, 21), (250, 150)), "minicpmv4_7": ((30, 21), (60, 55), (90, 40))}
MEAN_AND_STD = ([0.5] * 3, [0.5] * 3)


def nemotron_omni_config(text: dict[str, Any], image_token: int) -> Any:
    """Return the config of a Nemotron Omni with an encoder of audio."""
    audio = {"num_hidden_layers": 2, "num_attention_heads": 4, "subsampling_conv_channels": 8}
    audio |= {"hidden_size": 32, "intermediate_size": 48, "num_mel_bins": 16}
    return transformers.NemotronH_Omni_Reasoning_V3_Config(
        vision_config=RADIO,
        audio_config=audio | {"projection_hidden_size": 40, "projection_bias": True},
        text_config=text | RECURRENT["nemotron-h"][1] | {"model_type": "nemotron_h"},
        vision_hidden_size=RADIO["hidden_size"],
        projector_hidden_size=56,
        image_token_id=image_token,
    )


def image_config(kind: str) -> Any:
    """Return the config of transformers' model for a kind."""
    text = SMALL | {"head_dim": 8}
    if kind == "apertus1p5":
        codes = {"base_channels": 32, "channel_multiplier": [1, 2, 2], "num_res_blocks": 1}
        codes |= {"resolution": 16, "attn_resolutions": [8], "codebook_size": 30, "embed_dim": 12}
        return transformers.Apertus1p5Config(
            vision_config=codes | {"latent_channels": 10},
            text_config=SMALL,
            audio_config={"codebook_size": 10, "codebook_dim": 16, "hidden_size": 16}
            | {"num_filters": 4, "num_lstm_layers": 1, "decoder_num_layers": 1},
            image_token_id=IMAGE_TOKEN,
            image_token_offset=50,
            audio_token_offset=80,
        )
    if kind == "chameleon":
        codes = {"base_channels": 32, "channel_multiplier": [1, 2, 2], "num_res_blocks": 1}
        codes |= {"resolution": 16, "attn_resolutions": [8], "num_embeddings": 30}
        # The tokens of codes have another order than the codes.
        letters = str.maketrans("0123456789", "ABCDEFGHIJ")
        names = {f"IMGIMG{str(code).translate(letters)}Z": 79 - code for code in range(30)}
        return transformers.ChameleonConfig(
            **SMALL,
            vq_config=codes | {"embed_dim": 12, "latent_channels": 10},
            vocabulary_map=names | {"<image>": IMAGE_TOKEN},
        )
    if kind == "video_llama_3":
        return transformers.VideoLlama3Config(
            vision_config={name: SQUARE[name] for name in SQUARE if name != "image_size"},
            text_config=SMALL | {"model_type": "qwen2"},
            image_token_id=IMAGE_TOKEN,
            video_token_id=IMAGE_TOKEN - 1,
        )
    if kind == "nemotron_h_omni":
        config = nemotron_omni_config(SMALL, IMAGE_TOKEN)
        config.audio_config = None
        return config
    if kind == "step3p7":
        decoder, sizes = MULTIMODAL["Step3p7"]
        return transformers.Step3p7Config(
            vision_config=SQUARE | {"image_size": 32, "mlp_ratio": 1.5},
            text_config=SMALL | sizes | {"model_type": decoder},
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "idefics2":
        perceiver = {"resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4}
        perceiver |= {"resampler_head_dim": 16, "num_key_value_heads": 2}
        return transformers.Idefics2Config(
            vision_config=SQUARE,
            perceiver_config=perceiver | {"hidden_size": SMALL["hidden_size"]},
            text_config=SMALL | {"model_type": "mistral", "pad_token_id": 0},
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "janus":
        return transformers.JanusConfig(
            vision_config=SQUARE | {"mlp_ratio": 1.5, "projection_dim": 48},
            vq_config=JANUS_IMAGES,
            text_config=text | {"model_type": "llama"},
            image_token_id=IMAGE_TOKEN,
        )
    if kind in ("got_ocr2", "pp_chart2table"):
        sizes = {"image_size": 32, "window_size": 3}
        name = "GotOcr2" if kind == "got_ocr2" else "PPChart2Table"
        return getattr(transformers, f"{name}Config")(
            vision_config=DEEPSEEK["sam_config"] | sizes,
            text_config=SMALL | {"model_type": "qwen2"},
            image_token_index=IMAGE_TOKEN,
            tie_word_embeddings=False,
        )
    if kind == "deepseek_vl":
        return transformers.DeepseekVLConfig(
            vision_config=SQUARE | {"model_type": "siglip_vision_model", "vision_use_head": False},
            text_config=text | {"model_type": "llama"},
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "deepseek_vl_hybrid":
        return transformers.DeepseekVLHybridConfig(
            vision_config=SQUARE | {"model_type": "siglip_vision_model", "vision_use_head": False},
            high_res_vision_config=DEEPSEEK["sam_config"]
            | {"model_type": "sam_vision_model", "image_size": 64, "num_hidden_layers": 3},
            text_config=text | {"model_type": "llama"},
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "ovis2":
        return transformers.Ovis2Config(
            vision_config=SQUARE | {"hidden_stride": 2, "vocab_size": 40},
            text_config=SMALL | {"model_type": "qwen2"},
            image_token_id=IMAGE_TOKEN,
            visual_indicator_token_ids=OVIS_MARK_IDS,
            hidden_size=SMALL["hidden_size"],
            vocab_size=SMALL["vocab_size"],
        )
    if kind == "dots3_note":
        return transformers.Dots3NoteConfig(
            vision_config=DOTS,
            audio_config=DOTS_AUDIO,
            text_config=SMALL
            | WITH_EXPERTS["dots3-note"][1]
            | LIKE_OTHER_LAYERS
            | {"model_type": "dots3_note_text"},
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "exaone4_5":
        return transformers.Exaone4_5_Config(
            vision_config=EXAONE,
            text_config=text | {"model_type": "exaone4", "sliding_window": 9},
            image_token_id=IMAGE_TOKEN,
            tie_word_embeddings=False,
        )
    if kind == "opencua":
        # It is saved with its published names.
        return transformers.Exaone4_5_Config(
            vision_config=EXAONE | {"num_key_value_heads": 4},
            text_config=SMALL | {"model_type": "qwen2"},
            image_token_id=IMAGE_TOKEN,
            tie_word_embeddings=False,
        )
    if kind == "deepseek_ocr2":
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        experts |= {"n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]}
        return transformers.DeepseekOcr2Config(
            vision_config=DEEPSEEK, text_config=SMALL | experts, image_token_id=IMAGE_TOKEN
        )
    if kind == "lfm2_vl":
        layers = {"layer_types": ["conv", "full_attention", "conv"]}
        return transformers.Lfm2VlConfig(
            vision_config=SIGLIP,
            text_config=SMALL | {"model_type": "lfm2"} | layers,
            projector_hidden_size=56,
            image_token_id=IMAGE_TOKEN,
            tie_word_embeddings=True,
        )
    if kind == "muse_spark":
        return transformers.MuseSparkConfig(
            vision_config=MUSE,
            text_config=SMALL | MULTIMODAL["MuseSpark"][1],
            audio_config=AUDIO_SIZES | {"out_hidden_size": SMALL["hidden_size"]},
            out_hidden_size=4 * 48,
            projector_hidden_size=56,
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "muse_glimmer":
        return transformers.MuseGlimmerConfig(
            vision_config=MUSE,
            text_config=text | {"sliding_window": 9},
            out_hidden_size=4 * 48,
            projector_hidden_size=56,
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "minimax_m3_vl":
        layers = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
        layers["layer_types"] = ["full_attention"] * 3
        # Two of 20 elements of a head are not rotated.
        vision = KIMI | {"model_type": "minimax_m3_vl_vision", "hidden_size": 80}
        return transformers.MiniMaxM3VLConfig(
            vision_config=vision,
            text_config=SMALL | BLOCKS_OF_KEYS | layers,
            projector_hidden_size=56,
            image_token_index=IMAGE_TOKEN,
            tie_word_embeddings=False,
        )
    if kind == "hyperclovax_vision_v2":
        return transformers.HyperCLOVAXVisionV2Config(
            vision_config=EXAONE | {"model_type": "qwen2_5_vl_vision", "out_hidden_size": 40},
            text_config=SMALL | {"model_type": "hyperclovax", "logits_scaling": 0.5},
            image_token_id=IMAGE_TOKEN,
            tie_word_embeddings=False,
        )
    if kind == "minicpmv4_7":
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        decoder = {"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 3}
        decoder["rope_parameters"] = rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        names = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
        return transformers.MiniCPMV4_7Config(
            vision_config=MINICPM,
            text_config=text | decoder,
            insert_layer_id=1,
            image_token_id=IMAGE_TOKEN,
            **dict(zip(names, MARKS.values(), strict=True)),
        )
    if kind == "minicpm_ocr":
        # All positions of a token are equal, although the decoder's config has three axes.
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        decoder = {"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 3}
        decoder["rope_parameters"] = rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        return transformers.MiniCPMOcrConfig(
            vision_config=MINICPM, text_config=text | decoder, image_token_id=IMAGE_TOKEN
        )
    if kind == "minicpmv4_6":
        return transformers.MiniCPMV4_6Config(
            vision_config=MINICPM,
            text_config=text | {"model_type": "qwen3"},
            insert_layer_id=1,
            image_token_id=IMAGE_TOKEN,
        )
    if kind in INKLING_MODELS:
        size = SMALL["hidden_size"]
        family, text = RECURRENT[kind.replace("_", "-")]
        return getattr(transformers, f"{family.removesuffix('Text')}Config")(
            vision_config=INKLING | {"text_hidden_size": size},
            text_config=SMALL | text,
            image_token_id=IMAGE_TOKEN,
        )
    latent = LATENT | {"model_type": "deepseek_v3", "first_k_dense_replace": 3}
    return transformers.Kimi_K25Config(
        vision_config=KIMI,
        text_config=SMALL | latent,
        projection_hidden_size=48,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )
