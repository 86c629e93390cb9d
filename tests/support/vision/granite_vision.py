"""The parts of Granite's models that read images, for `vision_checkpoints`."""

from __future__ import annotations

from typing import Any

import transformers

_SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}


def granite4_vision(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the config of a model, and the fields of its image processor and of its processor."""
    tile = tower["image_size"]
    grids = [[tile * rows, tile * columns] for rows, columns in ((1, 1), (1, 2), (2, 1), (2, 2))]
    # The first part of an embedding is zero, because no outputs are added before the first layer.
    first = 1 if kind.endswith("-late") else 0
    config = transformers.Granite4VisionConfig(
        vision_config=tower | {"model_type": "siglip_vision_model", "hidden_size": 64},
        text_config=text | _SCALES | {"model_type": "granite4_vision_text", "num_hidden_layers": 8},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=grids,
        vision_feature_select_strategy="full",
        downsample_rate="2/4",
        deepstack_layer_map=[[-1, first], [1, 3]],
        spatial_vision_layer=-2,
        spatial_target_layers=[2, 4, 5, 7],
        qformer_config={
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 48,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
        tie_word_embeddings=False,
    )
    processor = {
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": grids,
        "size": {"shortest_edge": tile},
        "crop_size": {"height": tile, "width": tile},
    }
    others = {
        "processor_class": "Granite4VisionProcessor",
        "vision_feature_select_strategy": "full",
        "patch_size": tower["patch_size"],
        "downsample_rate": "2/4",
    }
    return config, processor, others


def granite_docling(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the config of a random Granite for Docling, and the fields of its processor files."""
    tile, size = tower["image_size"], text["hidden_size"]
    config = transformers.GraniteDoclingConfig(
        vision_config=tower
        | {"out_hidden_size": size, "scale_factor": 4, "deepstack_visual_indexes": [0, 2]},
        text_config=text | _SCALES | {"model_type": "granite_docling_text"},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        density_router_hidden_size=24,
        tie_word_embeddings=False,
    )
    processor = {
        "image_processor_type": "GraniteDoclingImageProcessor",
        "max_patches": 6,
        "dense_max_patches": 8,
        "dense_max_scale": 0.5,
        "dense_min_aspect": 0.6,
        "dense_max_aspect": 1.4,
        "size": {"height": tile, "width": tile},
    }
    return config, processor, {"processor_class": "GraniteDoclingProcessor", "image_seq_len": 4}


def blip2(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the config of a BLIP-2, and the fields of its image processor and of its processor."""
    decoder = {"model_type": "opt", "ffn_dim": 80, "word_embed_proj_dim": text["hidden_size"]}
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    decoder |= {name: text[name] for name in names} | {"max_position_embeddings": 1024}
    queries = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    queries |= {"num_attention_heads": 4, "encoder_hidden_size": tower["hidden_size"]}
    config = transformers.Blip2Config(
        vision_config=tower,
        qformer_config=queries,
        text_config=decoder,
        num_query_tokens=6,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    tile = tower["image_size"]
    processor = {"image_processor_type": "BlipImageProcessor"}
    processor |= {"size": {"height": tile, "width": tile}}
    return config, processor, {"processor_class": "Blip2Processor", "num_query_tokens": 6}
