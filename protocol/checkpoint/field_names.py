"""Give models and config fields that files name differently one common name; that of a field is Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from .config_fields import ConfigFields
from .published.read import published_fields
from .published.renamed import decoder_alone

TASK_ADAPTERS: Final = "task_adapters"
"""The config field with the names of the tasks for which a checkpoint has LoRA adapters, in its folder `adapters`."""

_ARCHITECTURES: Final = {
    "BailingMoEForCausalLM": "BailingMoeForCausalLM",
    "BertForPreTraining": "BertForMaskedLM",
    "BertLMHeadModel": "BertForMaskedLM",
    "CamembertForMaskedLM": "RobertaForMaskedLM",
    "CamembertForSequenceClassification": "RobertaForSequenceClassification",
    "CamembertForTokenClassification": "RobertaForTokenClassification",
    "CamembertModel": "RobertaModel",
    "ColBERTJinaRobertaModel": "HF_ColBERT",
    "ColBERTLfm2Model": "Lfm2Model",
    "ColBERTModel": "HF_ColBERT",
    "ColBERTModernBertModel": "ModernBertModel",
    "Contriever": "BertModel",
    "Data2VecTextForSequenceClassification": "RobertaForSequenceClassification",
    "Data2VecTextForTokenClassification": "RobertaForTokenClassification",
    "Data2VecTextModel": "RobertaModel",
    "Dots3NoteTextForCausalLM": "Dots3NoteForCausalLM",
    "Cosmos3ForConditionalGeneration": "Cosmos3OmniForConditionalGeneration",
    "DeepseekOCR2ForCausalLM": "DeepseekOcr2ForConditionalGeneration",
    "DeepseekV3BidirectionalModel": "DeepseekV3Model",
    "DeepseekV4ForConditionalGeneration": "DeepseekV4ForCausalLM",
    "DeepseekVL2ForCausalLM": "DeepseekVLV2ForCausalLM",
    "ElectraForPreTraining": "ElectraForMaskedLM",
    "EmbeddingGemmaModel": "Gemma3TextModel",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "Grok1ModelForCausalLM": "Grok1ForCausalLM",
    "GritLM": "MistralForCausalLM",
    "GrokForCausalLM": "Grok1ForCausalLM",
    "GteNewForSequenceClassification": "NewForSequenceClassification",
    "GteNewModel": "NewModel",
    "H2OVLChatModel": "InternVLChatModel",
    "KimiK3LinearForCausalLM": "KimiLinearForCausalLM",
    "LFM2ForCausalLM": "Lfm2ForCausalLM",
    "LLaDAMoEModel": "LLaDAMoEModelLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "LlamaBidirectionalForSequenceClassification": "LlamaForSequenceClassification",
    "LlamaBidirectionalModel": "LlamaModel",
    "LlamaEmbeddingModel": "LlamaModel",
    "LlamaForClassification": "LlamaForSequenceClassification",
    "MiMoV2OmniForCausalLM": "MiMoV2ForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
    "MistralLarge3ForCausalLM": "Mistral4ForCausalLM",
    "MuseGlimmerForCausalLM": "MuseGlimmerForConditionalGeneration",
    "NVLM_D": "InternVLChatModel",
    "NVLM_D_Model": "InternVLChatModel",
    "NemotronH_Nano_Omni_Reasoning_V3": "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2": "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3": "NemotronH_Omni_Reasoning_V3",
    "NeoBERT": "NeoBERTModel",
    "NeoBERTLMHead": "NeoBERTForMaskedLM",
    "OLMoForCausalLM": "OlmoForCausalLM",
    "PLaMo2ForCausalLM": "Plamo2ForCausalLM",
    "PLaMo3ForCausalLM": "Plamo3ForCausalLM",
    "QuantMixtralForCausalLM": "MixtralForCausalLM",
    "RND1": "RND1LM",
    "RWForCausalLM": "FalconForCausalLM",
    "ShieldGemma2ForImageClassification": "Gemma3ForConditionalGeneration",
    "SeamlessM4TModel": "SeamlessM4TForSpeechToText",
    "SeamlessM4Tv2Model": "SeamlessM4Tv2ForSpeechToText",
    "SkyworkR1VChatModel": "InternVLChatModel",
    "StableLMEpochForCausalLM": "StableLmForCausalLM",
    "T5WithLMHeadModel": "T5ForConditionalGeneration",
    "TeleChatForCausalLM": "TeleChat2ForCausalLM",
    "TelechatForCausalLM": "TeleChat2ForCausalLM",
    "TorchNativeLlamaForCausalLM": "LlamaForCausalLM",
    "TorchNativePhi3ForCausalLM": "Phi3ForCausalLM",
    "VoyageQwen3BidirectionalEmbedModel": "Qwen3Model",
    "XllmForCausalLM": "K2HorizonForCausalLM",
    "YiVLForCausalLM": "LlamaForCausalLM",
    "Qwen3ASRForcedAlignerForTokenClassification": "Qwen3ASRForTokenClassification",
    "Qwen3ASRRealtimeGeneration": "Qwen3ASRForConditionalGeneration",
    "VoxtralRealtimeGeneration": "VoxtralRealtimeForConditionalGeneration",
}
"""Other names of architectures in published configs and in the registries of other servers."""


def _bidirectional(fields: ConfigFields) -> dict[str, Any]:
    if (pooling := fields.text("pooling", "avg")) not in ("avg", "cls"):
        raise fields.wrong("pooling", "'avg' or 'cls'", pooling)
    return {
        "model_type": "llama",
        "is_causal": False,
        "classifier_pooling": "mean" if pooling == "avg" else pooling,
    }


def _phi3_small(fields: ConfigFields) -> dict[str, Any]:
    rope = fields.first_section("rope_scaling").config
    if not rope:
        rope = {"rope_type": "linear", "factor": fields.positive("rope_position_scale", 1.0)}
    return {
        "intermediate_size": fields.integer("ff_intermediate_size", 14_336),
        "rope_theta": fields.positive("rope_embedding_base", 1e6),
        "rope_scaling": rope,
    }


def _deepseek_ocr2(fields: ConfigFields) -> dict[str, Any]:
    """Return the sizes that the model's own code has. Its reader is Qwen2 0.5B."""
    fields.first_section("projector_config").require("n_embed", 1280)
    reader = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    return {
        "model_type": "deepseek_ocr2",
        "image_token_id": fields.get("image_token_id", 128_815),
        "vision_config": {"sam_config": {}, "encoder_config": reader},
    }


def _nemotron_omni(fields: ConfigFields) -> dict[str, Any]:
    """Return the names that transformers has for fields of published configs."""
    names = {
        "audio_config": "sound_config",
        "audio_token_id": "sound_context_token_id",
        "image_token_id": "img_context_token_id",
    }
    found = {name: fields.get(name, fields.get(other)) for name, other in names.items()}
    return found | {"model_type": "nemotron_h_omni"}


def _qwen3_asr(fields: ConfigFields) -> dict[str, Any]:
    """Return the fields of a forced aligner, which classifies tokens by their times; none for other models."""
    num_labels = fields.first_section("thinker_config").get("classify_num")
    if num_labels is None:
        return {}
    return {
        "architectures": ["Qwen3ASRForTokenClassification"],
        "num_labels": num_labels,
        "token_classification_bias": False,
    }


def _jina_v5(fields: ConfigFields) -> dict[str, Any]:
    """Return the fields of the model without its adapters, a Qwen3 (small) or an encoder, EuroBERT (nano)."""
    is_decoder = fields.boolean("is_decoder", True)
    return {
        "architectures": ["Qwen3Model" if is_decoder else "EuroBertModel"],
        "model_type": "qwen3" if is_decoder else "eurobert",
        TASK_ADAPTERS: fields.texts("task_names"),
    }


def _llada(fields: ConfigFields) -> dict[str, Any]:
    """Return Llama's names of fields that the config of LLaDA has under those of the first OLMo."""
    names = {
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "num_key_value_heads": "n_kv_heads",
        "tie_word_embeddings": "weight_tying",
    }
    return {name: value for name, own in names.items() if (value := fields.get(own)) is not None}


def _minimax(fields: ConfigFields) -> dict[str, Any]:
    fields.require_all(postnorm=True, shared_intermediate_size=0)
    kinds = fields.per_layer("attn_type_list", fields.layer_count("num_hidden_layers"))
    factors = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    size = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    return {
        "model_type": "minimax",
        "layer_types": kinds and ["full_attention" if x else "linear_attention" for x in kinds],
        "partial_rotary_factor": fields.integer("rotary_dim", size)
        / fields.integer("head_dim", size),
    } | {
        f"{name}_{end}_factor": fields.get(f"layernorm_{other}_{end}")
        for name, other in factors.items()
        for end in ("alpha", "beta")
    }


_MODEL_TYPES: Final[dict[str, Callable[[ConfigFields], dict[str, Any]]]] = {
    "RefinedWeb": lambda fields: {
        "model_type": "falcon",
        "num_kv_heads": fields.get("n_head_kv"),
        "new_decoder_architecture": True,
    },
    "RefinedWebModel": lambda _: {"model_type": "falcon"},
    "camembert": lambda _: {"model_type": "roberta"},
    "data2vec-text": lambda _: {"model_type": "roberta"},
    "glmga": lambda _: {"model_type": "glm46v"},
    "llada": _llada,
    "llama_bidirec": _bidirectional,
    "minimax_m1": _minimax,
    "minimax_text_01": _minimax,
    "neobert": lambda fields: {
        "max_position_embeddings": fields.get(
            "max_position_embeddings", fields.get("max_length", 4096)
        ),
    },
    "phi3small": _phi3_small,
    "shieldgemma2": lambda _: {"model_type": "gemma3"},
    "skywork_chat": lambda _: {"model_type": "internvl_chat"},
    "stablelm_epoch": lambda fields: {
        "model_type": "stablelm",
        "partial_rotary_factor": fields.get("rope_pct"),
    },
}
"""Other model types in published configs, and functions that return the fields that transformers has in their place."""


_OF_ARCHITECTURE: Final[dict[str, Callable[[ConfigFields], dict[str, Any]]]] = {
    "DeepseekOCR2ForCausalLM": _deepseek_ocr2,
    "DeepseekV3BidirectionalModel": lambda _: {"is_causal": False},
    "EmbeddingGemmaModel": lambda _: {"use_bidirectional_attention": True},
    "FireRedASR2ForConditionalGeneration": lambda fields: {
        "model_type": "fireredasr2",
        "text_config": {**fields.config, "model_type": "qwen2"},
    },
    "FunASRForConditionalGeneration": lambda fields: {
        "model_type": "funasr",
        "text_config": {**fields.config, "model_type": "qwen3"},
    },
    "JinaEmbeddingsV5Model": _jina_v5,
    **dict.fromkeys(("LLaDAMoEModel", "LLaDAMoEModelLM"), lambda _: {"model_type": "llada_moe"}),
    "Lfm2AudioForConditionalGeneration": lambda fields: {
        "model_type": "lfm2_audio",
        "audio_config": fields.get("encoder"),
        "text_config": {**fields.first_section("lfm").config, "model_type": "lfm2"},
    },
    "Lfm2BidirectionalModel": lambda _: {"is_causal": False},
    "LlamaForClassification": lambda fields: {
        "num_labels": fields.get("num_labels", fields.get("classification_out_size"))
    },
    "MistralLarge3ForCausalLM": lambda _: {"model_type": "mistral4"},
    **dict.fromkeys(
        ("Qwen3ASRForConditionalGeneration", "Qwen3ASRForcedAlignerForTokenClassification"),
        _qwen3_asr,
    ),
    "VoyageQwen3BidirectionalEmbedModel": lambda fields: {
        "is_causal": False,
        "embedding_projection": "linear",
        "embedding_dim": fields.get("num_labels"),
    },
    "YiVLForCausalLM": lambda _: {"model_type": "llama"},
}
"""Architectures whose configs lack fields that transformers has for their models, and functions that return these."""


_OWN_NEMOTRON: Final = ("nemotron_h_omni", "NemotronH_Nano_VL_V2")
"""Model types of Nemotron's that read images, whose fields are known as they are."""


def with_known_architectures(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides of a config's fields with the names of architectures that transformers has."""
    found = dict(overrides)
    if isinstance(names := overrides.get("architectures"), list):
        found["architectures"] = [_ARCHITECTURES.get(str(name), name) for name in names]
    return found


def with_known_names(fields: ConfigFields) -> ConfigFields:
    """Return the fields of a config with the names that transformers has for its architecture and its model type."""
    names = fields.texts("architectures")
    known = [_ARCHITECTURES.get(name, name) for name in names]
    kind = fields.text("model_type", "")
    values: dict[str, Any] = {} if known == names else {"architectures": known}
    if kind in _MODEL_TYPES:
        values |= _MODEL_TYPES[kind](fields)
    elif "NemotronH_Omni_Reasoning_V3" in known and kind not in _OWN_NEMOTRON:
        values |= _nemotron_omni(fields)
    for name in names:
        if name in _OF_ARCHITECTURE:
            values |= _OF_ARCHITECTURE[name](fields)
    values |= published_fields(fields)
    values |= decoder_alone(fields)
    return fields.with_values(values) if values else fields


_OTHER_NAMES: Final = {
    "hidden_size": ("n_embd", "n_embed", "dim", "d_model", "model_dim"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers", "num_transformer_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num"),
    "head_dim": ("kv_channels", "hidden_size_per_head"),
    "vocab_size": ("padded_vocab_size",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "max_position_embeddings": (
        "n_positions",
        "seq_length",
        "max_seq_len",
        "model_max_length",
        "max_context_length",
    ),
    "rms_norm_eps": (
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layernorm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
    "hidden_act": ("activation_function", "activation"),
}


_NOT_READ: Final = {
    "head_dim": {
        "biogpt",
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "mpt",
        "openai-gpt",
        "opt",
        "persimmon",
        "stablelm",
    },
    "intermediate_size": {
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "opt",
        "xglm",
    },
    "num_key_value_heads": {"falcon"},
}
"""Fields that these model types name differently. Transformers keeps them in the configs it saves, but ignores them."""


def with_common_names(fields: ConfigFields) -> ConfigFields:
    """Return the fields, adding Llama's name for each field that has another name in this family.

    Fields of Llama that transformers ignores in this family are dropped.

    If the output projection has fewer rows than the embedding, `vocab_size` becomes their number. A projection that is
    tied to the embedding has as many rows, whatever the config says.
    """
    if fields.get("transformers_version") is not None:
        kind = fields.get("model_type")
        fields = fields.with_values(
            {name: None for name, kinds in _NOT_READ.items() if kind in kinds}
        )
    found: dict[str, Any] = {}
    outputs = fields.optional_integer("output_vocab_size")
    if outputs is None:
        outputs = fields.optional_integer("unpadded_vocab_size")
    is_tied = fields.get("tie_word_embeddings") is True
    if outputs is not None and not is_tied and fields.get("num_unused_embeddings") is None:
        size = fields.integer("vocab_size", minimum=outputs)
        found |= {"vocab_size": outputs, "num_unused_embeddings": size - outputs}
    for name, others in _OTHER_NAMES.items():
        # A Cohere 2 MoE config without an epsilon for RMS norms describes a model with layer norms.
        is_absent = name == "rms_norm_eps" and fields.get("model_type") == "cohere2_moe"
        if fields.get(name) is None and not is_absent:
            value = next(
                (fields.get(other) for other in others if fields.get(other) is not None), None
            )
            if value is not None:
                found[name] = value
    return fields.with_values(found)


_SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_NESTED_SIZES: Final[dict[str, tuple[int | None, ...]]] = {
    "aria_text": (4096, 4096, 32, 32, None, None, 32_000, 2048),
    "clip_text_model": (512, 2048, 12, 8, None, None, 49_408, 77),
    "cohere": (8192, 22_528, 40, 64, None, None, 256_000, 8192),
    "cohere2": (8192, 22_528, 40, 64, None, None, 256_000, 8192),
    "emu3_text_model": (4096, 14336, 32, 32, 8, None, 184_622, 9216),
    "ernie4_5": (1024, 3072, 18, 16, 2, 128, 103_424, 131_072),
    "exaone4": (4096, 16384, 32, 32, 32, None, 102_400, 2048),
    "gemma": (3072, 24_576, 28, 16, 16, 256, 256_000, 8192),
    "gemma2": (2304, 9216, 26, 8, 4, 256, 256_000, 8192),
    "gemma3_text": (2304, 9216, 26, 8, 4, 256, 262_208, 131_072),
    "glm4": (4096, 13696, 40, 32, 2, 128, 151_552, 131_072),
    "glm4v_text": (4096, 13696, 40, 32, 2, None, 151_552, 32_768),
    "glm_ocr_text": (1024, 4096, 16, 16, 8, None, 59_392, 131_072),
    "gpt_oss": (2880, 2880, 36, 64, 8, 64, 201_088, 131_072),
    "granite": (4096, 11008, 32, 32, None, None, 32_000, 2048),
    "hyperclovax": (4096, 11008, 32, 32, None, None, 32_000, 2048),
    "lfm2": (2560, 12288, 32, 32, 8, None, 65_536, 128_000),
    "llama": (4096, 11008, 32, 32, None, None, 32_000, 2048),
    "ministral3": (4096, 14336, 34, 32, 8, 128, 131_072, 262_144),
    "mistral": (4096, 14336, 32, 32, 8, None, 32_000, 131_072),
    "mixtral": (4096, 14336, 32, 32, 8, None, 32_000, 131_072),
    "mllama_text_model": (4096, 14336, 40, 32, 8, None, 128_256, 131_072),
    "olmo2": (4096, 11008, 32, 32, None, None, 50_304, 2048),
    "paddleocr_vl_text": (1024, 3072, 18, 16, 2, 128, 103_424, 131_072),
    "persimmon": (4096, 16384, 36, 64, None, None, 262_144, 16384),
    "phi": (2048, 8192, 24, 32, None, None, 51_200, 2048),
    "phi3": (3072, 8192, 32, 32, None, None, 32_064, 4096),
    "qwen2": (4096, 22_016, 32, 32, 32, None, 151_936, 32_768),
    "qwen2_5_vl_text": (8192, 29_568, 80, 64, 8, None, 152_064, 32_768),
    "qwen2_moe": (2048, 5632, 24, 16, 16, None, 151_936, 32_768),
    "qwen2_vl_text": (8192, 29_568, 80, 64, 8, None, 152_064, 32_768),
    "qwen3": (4096, 22_016, 32, 32, 32, 128, 151_936, 32_768),
    "qwen3_5_text": (4096, 12288, 32, 16, 4, 256, 248_320, 32_768),
    "qwen3_moe": (2048, 6144, 24, 32, 4, None, 151_936, 32_768),
    "qwen3_vl_moe_text": (2048, 5632, 24, 16, 16, None, 151_936, 128_000),
    "qwen3_vl_text": (4096, 22_016, 32, 32, 32, 128, 151_936, 128_000),
    "siglip_text_model": (768, 3072, 12, 12, None, None, 32_000, 64),
    "smollm3": (2048, 11008, 36, 16, 4, None, 128_256, 32_768),
    "voxtral_realtime_text": (4096, 14336, 32, 32, 8, None, 32_000, 131_072),
}
"""Defaults of `_SIZES` by model type, as in transformers; None for those that follow from other fields.

Configs of models that read images or audio omit decoder fields that have these values.
"""


_PART_SECTIONS: Final = {
    **dict.fromkeys(("colmodernvbert", "colpali", "colqwen2"), "vlm_config"),
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), "thinker_config"),
}
"""Model type -> the section with the whole config of the part that reads texts, images and audio."""

_OF_WHOLE: Final = ("architectures", "dtype", "torch_dtype", "transformers_version")


def fields_of_part(config: ConfigFields) -> dict[str, Any]:
    """Return the config of the part of a model that Engine serves, without fields of the whole model.

    ColPali has another matrix after this part, and Qwen-Omni has other parts that speak. For all other models, return
    {}.
    """
    name = _PART_SECTIONS.get(config.text("model_type", ""))
    section = None if name is None else config.section(name)
    if section is None:
        return {}
    return {name: value for name, value in section.config.items() if name not in _OF_WHOLE}


NUM_IMAGE_TOKENS: Final = 8
"""The number of tokens of Llama 3.2 Vision that are not in `vocab_size`, because the model never writes them."""

_TEXT_SECTIONS: Final = ("text_config", "llm_config", "language_config")
"""The names of the section that describes the text decoder. The first is transformers' own."""


def text_section(fields: ConfigFields) -> ConfigFields | None:
    """Return the section that describes a nested text decoder; None if the decoder is not nested.

    Qwen's Omni models nest it in the section of their thinker, the part that writes text.
    """
    fields = fields.section("thinker_config") or fields
    return next((text for name in _TEXT_SECTIONS if (text := fields.section(name))), None)


def read_text_config(fields: ConfigFields) -> ConfigFields | None:
    """Return the fields of a nested text decoder, completed with defaults; None if the decoder is not nested."""
    text = text_section(fields)
    if text is None:
        return None
    if fields.get("model_type") == "paligemma":
        # The field says that prompt tokens attend to later prompt tokens. Output tokens attend causally.
        text = text.with_values({"use_bidirectional_attention": None})
    if fields.get("model_type") == "mllama" and fields.section("vision_config") is not None:
        size = text.integer("vocab_size", 128_256) + NUM_IMAGE_TOKENS
        text = text.with_values({"vocab_size": size})
    if fields.get("model_type") in ("molmo", "molmo2"):
        size = text.integer("vocab_size", 151_936) + text.integer("additional_vocab_size", 128)
        text = text.with_values({"vocab_size": size})
    sizes = zip(_SIZES, _NESTED_SIZES.get(text.text("model_type", ""), ()), strict=False)
    return text.with_defaults(**{name: size for name, size in sizes if size is not None})
