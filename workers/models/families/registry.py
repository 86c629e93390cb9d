"""The registry of model families, which finds the family of a checkpoint's config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from os import PathLike
from typing import Any, Final

from msgspec.structs import replace

from ....protocol.checkpoint.audio.tower import audio_tower_spec, has_audio_tower
from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.field_names import read_text_config, text_section, with_common_names
from ....protocol.checkpoint.pooling.classification import (
    CLASSIFIER_SUFFIX,
    HEAD_PARTS,
    TOKEN_CLASSIFIER_SUFFIX,
    YES_OR_NO,
    classifies_tokens,
    find_ranker,
    is_classifier,
    is_reward_model,
)
from ....protocol.checkpoint.pooling.embedding import attends_to_all, has_head
from ....protocol.checkpoint.pooling.sparse import SPLADE_SUFFIX
from ....protocol.checkpoint.speech import with_decoder_fields
from ....protocol.checkpoint.vision_presence import has_vision
from ....protocol.config.audio.tower import AudioTowerSpec, CausalSpec
from ....protocol.errors import CheckpointError
from ...layers.spec import ModelSpec
from ...layers.specs.experts import ExpertsSpec
from .common import Family, with_score_head, without_axes

_MODULES: Final = (
    # The default model and most others are found without importing further modules.
    "llama",
    "llama_variants",
    "gemma",
    "experts",
    # Without an architecture, the model type lfm2 means this decoder.
    "hybrid",
    "with_states.lfm2_encoder",
    "gpt",
    "layer_normed",
    "latent",
    "sigmoid_experts",
    "windowed",
    "state_space",
    "delta_attention",
    "deepseek_v4",
    "diffusion",
    "looped",
    "with_encoders.rotary",
    "with_encoders.absolute",
    "with_encoders.disentangled",
    "with_encoders.beside_images",
    "with_encoders.encoder_decoders",
    "with_encoders.t5",
    "with_encoders.joined",
    "with_encoders.mixtures",
    "with_encoders.prophetnet",
    "with_encoders.speech",
    "with_encoders.pre_normed",
    "with_convolutions.inkling",
    "with_convolutions.zaya",
    "with_images.aria",
    "with_images.deepseek",
    "with_images.donut",
    "with_images.dots3",
    "with_images.ernie",
    "with_images.git",
    "with_images.intern",
    "with_images.minicpm",
    "with_images.mistral",
    "with_images.mllama",
    "with_images.molmo",
    "with_images.moondream",
    "with_images.muse",
    "with_other_names.mixtures",
    "with_other_names.dense",
    "with_other_names.differential",
    "with_other_names.plamo",
    "with_other_names.step",
    "with_states.decisions",
    "with_states.gigachat",
    "with_states.jet_nemotron",
    "with_states.minicpm_sala",
    "with_states.phi4flash",
)
"""The modules of all families, in the order in which they are searched."""

_SAME_FAMILY = {
    "LLaVAOneVision1_5_text": "qwen3",
    "llava_onevision2_text": "qwen3",
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_asr_text": "qwen3",
}
"""Model types of checkpoints that have the same spec as another model type."""

_WITHOUT_CLASS = {"exaone", "internlm3", "iquestcoder", "sarvam_mla", "sarvam_moe"}
"""Model types that transformers computes with the class of another family, which it saves as the architecture."""

_OF_ANY_TYPE = re.compile(r"Transformers(MultiModal)?(MoE)?(Embedding|For)")
"""The beginning of architectures that vLLM gives to models of every type, which it computes with transformers' code."""

_CLASSES_OF_TEXT = {
    **{
        f"ModernVBert{suffix}": f"ModernBert{suffix}"
        for suffix in (CLASSIFIER_SUFFIX, TOKEN_CLASSIFIER_SUFFIX)
    },
    **{
        f"UltraVBert{suffix}": f"Ultrabert{suffix}"
        for suffix in (CLASSIFIER_SUFFIX, TOKEN_CLASSIFIER_SUFFIX, "ForMaskedLM", "Model")
    },
}
"""Architectures of models that read images, and those of their text encoders, which have the same head."""

_WITH_ANY_DECODER = {
    "AudioFlamingo3ForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
    "BailingMoeV3VLForConditionalGeneration",
    "BeeForConditionalGeneration",
    "Blip2ForConditionalGeneration",
    "ColIdefics3",
    "ColModernVBertForRetrieval",
    "ColPali",
    "ColPaliForRetrieval",
    "Cohere2VisionForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration",
    "DotsVLMForCausalLM",
    "Eagle2_5_VLForConditionalGeneration",
    "Emu3ForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "FastVlmForConditionalGeneration",
    "FireRedASR2ForConditionalGeneration",
    "FunASRForConditionalGeneration",
    "FunAsrNanoForConditionalGeneration",
    "FunAudioChatForConditionalGeneration",
    "FuyuForCausalLM",
    "GlmAsrForConditionalGeneration",
    "GlmEdgeForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "Granite4VisionForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration",
    "HCXVisionV2ForCausalLM",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
    "InternS1ForConditionalGeneration",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "LLaVAOneVision1_5_ForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "Lfm2AudioForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "Lfm3VlForConditionalGeneration",
    "LightOnOCRForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "LlamaNemotronVLForSequenceClassification",
    "LlamaNemotronVLModel",
    "Llama_Nemotron_Nano_VL",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevision2ForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "LocateAnythingForConditionalGeneration",
    "MantisForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
    "MERaLiON2ForConditionalGeneration",
    "MiDashengLMModel",
    "ModernVBertModel",
    *_CLASSES_OF_TEXT,
    "MiniCPMOcrForConditionalGeneration",
    "MiniCPMV",
    "MiniCPMV4_6ForConditionalGeneration",
    "MobileLlamaForCausalLM",
    "Mistral3ForConditionalGeneration",
    "MossAudioModel",
    "MossTranscribeDiarizeForConditionalGeneration",
    "MusicFlamingoForConditionalGeneration",
    "OpenCUAForConditionalGeneration",
    "OpenPanguVLForConditionalGeneration",
    "OpenVLAForActionPrediction",
    "NVILALiteForConditionalGeneration",
    "Ovis2ForConditionalGeneration",
    "Ovis2_5",
    "Ovis2_6ForCausalLM",
    "Ovis2_6_MoeForCausalLM",
    "Ovis2_6_NextForCausalLM",
    "PerceptionLMForConditionalGeneration",
    "POINTSV15ChatModel",
    "Phi4SiglipForCausalLM",
    "OmniASRForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3ASRForTokenClassification",
    "RForConditionalGeneration",
    "Sarashina2VisionForCausalLM",
    "SmolVLMForConditionalGeneration",
    "Step3VLForConditionalGeneration",
    "StepVLForConditionalGeneration",
    "VibeVoiceAsrForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "UltravoxForConditionalGeneration",
    "UltravoxModel",
    "VoxtralForConditionalGeneration",
    "YoutuVLForConditionalGeneration",
}
"""Architectures whose decoder, described by `text_config`, may be of any family."""


_DECODERS = {
    "audioflamingo3": "qwen2",
    "musicflamingo": "qwen2",
    "fun_asr_nano": "qwen3",
    "funaudiochat": "qwen2",
    "meralion2": "gemma2",
    "midashenglm": "qwen2",
    "moss_transcribe_diarize": "qwen3",
    "pointsv1.5_chat": "qwen2",
    "granite_speech": "granite",
    "granite_speech_plus": "granite",
    "qwen3_asr": "qwen3",
    "vibevoice_asr": "qwen2",
}
"""The decoder of models whose configs may omit it; others have Llama's."""

_WITHOUT_LOGIT_SCALE = {
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
}
"""Architectures whose logits are not multiplied by the decoder's `logit_scale`, as in transformers."""

_WITHOUT_OTHER_HEAD = re.compile(
    rf"(Text)?({CLASSIFIER_SUFFIX}|{TOKEN_CLASSIFIER_SUFFIX}|For(Process)?RewardModel|Model)$"
)


class UnknownArchitecture(CheckpointError):
    """Raised for an architecture that belongs to no family."""


def model_spec(config: Mapping[str, Any], path: str | PathLike[str]) -> ModelSpec:
    """Return the spec of the model that a Hugging Face config describes.

    Args:
        config: The content of a config.json.
        path: The config's file, for error messages.

    Raises:
        UnknownArchitecture: No family has the architecture.
        CheckpointError: A field is missing or invalid, or a feature is not supported.
    """
    fields = ConfigFields(config, path)
    whole, family = fields, _family(fields)
    text_fields = read_text_config(fields)
    if text_fields is not None:
        values: dict[str, Any] = {"model_type": family.model_type}
        if _WITHOUT_LOGIT_SCALE.intersection(fields.texts("architectures")):
            values["logit_scale"] = 1.0
        # The head's tensors have no prefix, because they belong to the whole model.
        is_tied = fields.get("tie_word_embeddings")
        if is_tied is not None and has_head(whole):
            values["tie_word_embeddings"] = is_tied
        fields = text_fields.with_values(values)
    fields = with_common_names(with_decoder_fields(fields))
    spec = family.read_spec(fields)
    spec = _with_directions(spec, fields, whole)
    if not has_head(whole):
        # The output projection is not used, so the checkpoint may omit it.
        spec = replace(spec, tie_word_embeddings=True, head_dense_bias=None, head_bias=False)
    # The classes of a nested decoder are those of the whole model.
    classes = whole.with_values({**fields.config, "architectures": whole.get("architectures")})
    if is_classifier(classes) and spec.score_head is None:
        spec = _with_classifier(spec, classes)
    _check_layers(spec, fields)
    # In published formats, the tower may be a part of the decoder.
    own = [(rf"^{re.escape(name)}\b.*", "") for name in whole.texts("image_parts")]
    spec = replace(spec, tensor_names=(*own, *spec.tensor_names))
    if has_vision(whole):
        # A late import, because a model without vision needs none of its modules.
        from .with_images.vision_tower import with_vision

        spec = with_vision(spec, whole)
    if has_audio_tower(whole):
        spec = _with_audio_tower(spec, whole)
    return spec


def _with_directions(spec: ModelSpec, fields: ConfigFields, whole: ConfigFields) -> ModelSpec:
    """Return the spec with attention in both directions if the config of the decoder says so."""
    if attends_to_all(fields) and spec.is_causal:
        if spec.alibi_slopes or any(layer.window or layer.recurrent for layer in spec.layers):
            name = "is_causal false"
            if fields.get("use_bidirectional_attention") is True:
                name = "use_bidirectional_attention"
            raise fields.error(
                f"{name} needs layers without windows, ALiBi and recurrent parts; use another model"
            )
        spec = replace(spec, is_causal=False)
    # The tokens of an image may attend to each other even if text is causal.
    name = "use_bidirectional_attention"
    if spec.is_causal and (whole.get(name) or fields.get(name)) not in (None, False, "vision"):
        raise fields.error(f"{name} cannot be used with this family; use another model")
    return spec


def _check_layers(spec: ModelSpec, fields: ConfigFields) -> None:
    if spec.layers and not any(layer.cache_groups for layer in spec.layers):
        raise fields.error("no layer has attention or a recurrent part; use another model")
    sizes = (spec.for_layer(layer) for layer in spec.layers)
    for num_heads, num_kv_heads in {(each.num_heads, each.num_kv_heads) for each in sizes}:
        if num_heads % num_kv_heads:
            raise fields.error(
                f"num_attention_heads {num_heads} must be a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
    for mixture in {layer.experts for layer in spec.layers if layer.experts is not None}:
        _check_groups(fields, mixture)


def _with_audio_tower(spec: ModelSpec, whole: ConfigFields) -> ModelSpec:
    """Return the spec with the model's audio tower."""
    tower = audio_tower_spec(whole, spec.hidden_size)
    # A tower may have tables like those of a decoder.
    dropped = (r".*\baudio_tower\..*", "")
    spec = replace(spec, audio_encoder=tower, tensor_names=(dropped, *spec.tensor_names))
    if isinstance(tower, AudioTowerSpec) and tower.added_after:
        if len(tower.added_after) > len(spec.layers):
            raise whole.error(
                f"the audio tower has outputs for layer {len(tower.added_after)}, "
                f"but the decoder has {len(spec.layers)} layers"
            )
        spec = replace(spec, added_after=tower.added_after)
    if isinstance(tower, CausalSpec):
        # A late import, because few models need it.
        from .with_encoders import speech

        spec = speech.with_delay(spec, tower)
    if spec.encoder is None:
        # The three coordinates of an audio clip's positions are equal, as those of text.
        spec = without_axes(spec)
    return spec


def _with_classifier(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    """Return the spec with the head that transformers gives to every decoder, or a head that reads each token."""
    if fields.get(HEAD_PARTS) is not None:
        parts = fields.texts(HEAD_PARTS)
        has_dense = "dense" in parts
        return with_score_head(
            spec,
            fields,
            dense=r"^score_head\.dense\." if has_dense else None,
            dense_bias="dense_bias" in parts,
            activation="gelu" if fields.text("model_type") == "modernbert" else "tanh",
            norm=r"^score_head\.norm\." if "norm" in parts else None,
            output=rf"^score_head\.{'output' if has_dense else '(output|dense)'}\.",
            output_bias="output_bias" in parts,
            takes_difference=YES_OR_NO in parts,
        )
    if "InternLM2ForRewardModel" in fields.texts("architectures"):
        return with_score_head(spec, fields, output=r"^v_head\.")
    ranker = find_ranker(fields)
    if ranker is not None or is_reward_model(fields):
        return with_score_head(
            spec,
            fields,
            dense=r"^score\.0\.",
            activation="relu",
            output=r"^score\.2\.",
            output_bias=True,
            offset=0.0 if ranker is None else ranker.offset,
        )
    if classifies_tokens(fields):
        has_bias = fields.boolean("token_classification_bias", True)
        # The forced aligner of Qwen's own format has the head of a decoder.
        names = r"^(score|classifier|(thinker\.)?lm_head)\."
        return with_score_head(spec, fields, output=names, output_bias=has_bias)
    return with_score_head(spec, fields, output=r"^(score|classification_head)\.")


def _check_groups(fields: ConfigFields, mixture: ExpertsSpec) -> None:
    num_groups, num_chosen = mixture.num_groups, mixture.num_groups_per_token
    if num_groups == 1:
        return
    if mixture.num_experts % num_groups:
        raise fields.error(f"n_group {num_groups} must divide {mixture.num_experts} experts")
    if num_chosen > num_groups:
        raise fields.error(f"topk_group must be at most n_group {num_groups}, got {num_chosen}")
    available = mixture.num_experts // num_groups * num_chosen
    if mixture.num_experts_per_token > available:
        raise fields.error(
            f"num_experts_per_tok must be at most {available}, the experts in topk_group {num_chosen} groups, "
            f"got {mixture.num_experts_per_token}"
        )


def all_families() -> list[Family]:
    """Import all modules of families, and return the families."""
    return [family for module in _MODULES for family in _families(module)]


def _families(module: str) -> tuple[Family, ...]:
    """Import a module of families, and return them."""
    found: tuple[Family, ...] = import_module(f".{module}", __package__).FAMILIES
    return found


def _by_architecture() -> Iterator[dict[str, Family]]:
    """Yield the families of one module after the other by their architectures. Modules are imported as needed."""
    for module in _MODULES:
        yield {family.architecture: family for family in _families(module)}


def _by_model_type() -> Iterator[dict[str, Family]]:
    """Yield the families of one module after the other by their model types. Modules are imported as needed."""
    others = CLASSIFIER_SUFFIX, TOKEN_CLASSIFIER_SUFFIX, SPLADE_SUFFIX
    for module in _MODULES:
        families = _families(module)
        yield {each.model_type: each for each in families if not each.architecture.endswith(others)}


def _family(fields: ConfigFields) -> Family:
    """Return the family for the architecture, else for the model type.

    The model type does not tell a classifier from a model that generates text.
    """
    architectures = fields.texts("architectures")
    text = text_section(fields)
    if text is not None and _WITH_ANY_DECODER.intersection(architectures):
        kind = _DECODERS.get(fields.text("model_type", ""), "llama")
        fields = text.with_defaults(model_type=kind)
        architectures = [_CLASSES_OF_TEXT[x] for x in architectures if x in _CLASSES_OF_TEXT]
    architectures = [name for name in architectures if not _OF_ANY_TYPE.match(name)]
    if fields.text("model_type", "") in _WITHOUT_CLASS:
        # A checkpoint saved by transformers has this family's tensors, but the other family's architecture.
        architectures = [name for name in architectures if not name.endswith("ForCausalLM")]
    if architectures:
        # Every decoder may have a classification head, or be stored without any head, as embedding models are. The
        # heads of encoders for tokens are alike, too.
        known = (
            _WITHOUT_OTHER_HEAD.sub(suffix, name)
            for name in architectures
            for suffix in ("ForCausalLM", "LMHeadModel")
        )
        bare = (re.sub(f"{TOKEN_CLASSIFIER_SUFFIX}$", "Model", name) for name in architectures)
        names = (*architectures, *known, *bare)
        found = next(
            (each[name] for name in names for each in _by_architecture() if name in each), None
        )
    else:
        model_type = fields.text("model_type", "")
        model_type = _SAME_FAMILY.get(model_type, model_type)
        found = next((each[model_type] for each in _by_model_type() if model_type in each), None)
    if found is None:
        kind = fields.get("model_type")
        named = ", ".join(architectures) or f"of model_type {kind!r}"
        # The part of a name before "For" is that of the family.
        from difflib import get_close_matches

        supported = sorted(family.architecture for family in all_families())
        families = {name.partition("For")[0]: name for name in supported}
        wanted = architectures[0].partition("For")[0] if architectures else str(kind)
        similar = [families[name] for name in get_close_matches(wanted, families, cutoff=0.7)]
        hint = f"similar ones are {', '.join(similar)}; " if similar else ""
        raise UnknownArchitecture(
            fields.path,
            f"the architecture {named} is not supported; {hint}"
            f"all {len(supported)} that are supported are in docs/reference/models.md",
        )
    return found
