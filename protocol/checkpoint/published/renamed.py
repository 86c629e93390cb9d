"""Read the configs of models that have the parts of other models under names of their own."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

_DECODERS: Final = ("ForCausalLM", "BertGenerationDecoder", "BertLMHeadModel")
_SECOND_HALVES: Final = frozenset(
    (
        "bart",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "mvp",
        "pegasus",
        "plbart",
        "whisper",
    )
)
_AFTER_PADDING: Final = frozenset(
    (
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
    )
)
_SAME_LAYERS: Final = frozenset(
    (
        "bert",
        "bert-generation",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roc_bert",
        "roformer",
    )
)


def nested(fields: ConfigFields, kind: str) -> dict[str, Any]:
    """Return the section of a decoder of a model type, whose fields are those of the whole config."""
    others = ("architectures", "auto_map", "model_type", "vision_config")
    own = {name: value for name, value in fields.config.items() if name not in others}
    return own | {"model_type": kind}


def colqwen3(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a Qwen3-VL that retrieves pages, whose model type may be its authors' own."""
    return {"model_type": "qwen3_vl"}


def dots_vlm(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of dots.vlm1, which has the tower of dots.ocr and the decoder of DeepSeek-V3."""
    return {
        "model_type": "dots_vlm",
        "text_config": nested(fields, "deepseek_v3"),
        "image_token_id": fields.get("image_token_id", 128_815),
    }


def alpamayo2(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of the Qwen3-VL in an Alpamayo 2, which also has an expert that is not served.

    The model reads tokens of trajectories, and never writes them.
    """
    own = fields.required_section("vlm_config")
    ids = fields.first_section("traj_ids")
    text = dict(own.required_section("text_config").config)
    firsts = [ids.integer(f"{name}_id0", -1, minimum=-1) for name in ("history", "future")]
    if min(firsts) >= 0:
        sizes = {"history": 1000, "future": 3000}
        count = sum(fields.integer(f"{name}_vocab_size", size) for name, size in sizes.items())
        text["silent_tokens"] = [min(firsts), min(firsts) + count]
    least = fields.integer("min_pixels", 163_840)
    limits = {"shortest_edge": least, "longest_edge": fields.integer("max_pixels", 196_608)}
    return {
        **own.config,
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "image_parts": ["expert"],
        "image_limits": {"size": limits, "min_pixels": None, "max_pixels": None},
    }


def ling3_vl(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of Ling 3 with images, whose rotary axes are not in the section of the decoder."""
    text = fields.required_section("text_config")
    axes = {"mrope_section": fields.get("mrope_section", text.get("mrope_section", [12, 10, 10]))}
    rope = {**text.first_section("rope_parameters").config, **axes}
    return {
        "model_type": "bailing_moe_v3_vl",
        "text_config": {**text.config, "model_type": "bailing_hybrid", "rope_parameters": rope},
        "image_parts": ["model.visual", "linear_proj", "model.linear_proj"],
    }


def llama_nemotron_vl(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of Llama Nemotron Embed or Rerank VL, whose decoder's tokens attend to later ones."""
    text = fields.required_section("llm_config")
    pooling = fields.text("pooling", text.text("pooling", "avg"))
    if pooling not in (kinds := {"avg": "mean", "cls": "cls", "last": "last"}):
        raise fields.wrong("pooling", "'avg', 'cls' or 'last'", pooling)
    values = {"model_type": "llama", "is_causal": False, "classifier_pooling": kinds[pooling]}
    return {
        "model_type": "llama_nemotron_vl",
        "image_token_id": fields.get("img_context_token_id"),
        "num_labels": fields.get("num_labels", text.get("num_labels")),
        "text_config": {**text.config, **values},
    }


def openpangu_vl(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of openPangu-VL, whose decoder's fields may be those of the whole config."""
    own = fields.section("text_config")
    text = nested(fields, "PanguEmbedded") if own is None else own.config
    values: dict[str, Any] = {"model_type": "PanguEmbedded"}
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.get(name)
        if isinstance(rope, dict) and rope.get("mrope_interleaved"):
            values[name] = rope | {"mrope_balanced": True, "rope_type": "default", "type": None}
    return {
        "model_type": "openpangu_vl",
        "text_config": {**text, **values},
        "image_parts": ["visual", "model.visual"],
        "image_token_texts": ["[unused19]"],
    }


def interns2(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of Intern-S2 Preview, which is a Qwen3.5 with experts; its time series are not read."""
    return {
        **interns2_mobius(fields, architecture),
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    }


def interns2_mobius(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of Intern-S2 Mobius, whose images and text config are those of a Qwen3.5 with experts."""
    text = {**fields.required_section("text_config").config, "model_type": "qwen3_5_moe_text"}
    return {"model_type": "qwen3_5_moe", "text_config": text}


def decoder_alone(fields: ConfigFields) -> dict[str, Any]:
    """Return the fields of a decoder whose model type else means an encoder, or both; none for other models."""
    names = fields.texts("architectures")
    if fields.get("is_decoder") is not True or not any(name.endswith(_DECODERS) for name in names):
        return {}
    kind, values = fields.text("model_type", ""), dict[str, Any]()
    if kind in _SECOND_HALVES:
        limit = fields.get("max_target_positions")
        values = {
            "num_hidden_layers": fields.get("decoder_layers"),
            "num_attention_heads": fields.get("decoder_attention_heads"),
            "intermediate_size": fields.get("decoder_ffn_dim"),
            "max_position_embeddings": limit or fields.get("max_position_embeddings"),
        }
    elif kind in _AFTER_PADDING:
        # The first position is that after the padding token's id.
        unused = fields.integer("pad_token_id", 1, minimum=0) + 1
        length = fields.integer("max_position_embeddings", 512, minimum=unused + 1)
        values = {"max_position_embeddings": length - unused}
    elif kind not in _SAME_LAYERS:
        return {}
    return values | {"architectures": names, "model_type": f"{kind}-decoder"}
