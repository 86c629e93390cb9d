"""Find out whether a model has a vision tower, without the modules that read towers."""

from __future__ import annotations

from typing import Final

from .config_fields import ConfigFields

_SECTIONS: Final = ("vision_config", "vit_config", "img_processor", "vq_config")
"""The names of sections of vision towers, in the order of precedence."""

_KINDS: Final = {
    "BeeForConditionalGeneration": "bee",
    "DeepseekOCRForCausalLM": "deepseek_ocr",
    "Eagle2_5_VLForConditionalGeneration": "eagle_2_5_vl",
    "HCXVisionV2ForCausalLM": "hyperclovax_vision_v2",
    "LightOnOCRForConditionalGeneration": "lighton_ocr",
    "Llama_Nemotron_Nano_VL": "Llama_Nemotron_Nano_VL",
    "LocateAnythingForConditionalGeneration": "locateanything",
    "MantisForConditionalGeneration": "mantis",
    "NemotronH_Omni_Reasoning_V3": "nemotron_h_omni",
    "OpenCUAForConditionalGeneration": "opencua",
    "Ovis2_6ForCausalLM": "ovis2_5",
    "Ovis2_6_MoeForCausalLM": "ovis2_5",
    "Ovis2_6_NextForCausalLM": "ovis2_5",
    "RForConditionalGeneration": "r_vl",
    "StepVLForConditionalGeneration": "step3_vl",
}
"""Architectures with the model type or the tower of another architecture, and the names of those models."""


def has_vision(fields: ConfigFields) -> bool:
    """Return whether a model with this config has a vision tower that Engine supports."""
    if not any(name in fields.config for name in ("embd_layer", *_SECTIONS)):
        return False
    # A late import, because most models have no vision tower and need none of the modules.
    from .vision.read import READERS

    return model_kind(fields) in READERS and vision_section(fields) is not None


def model_kind(fields: ConfigFields) -> str:
    """Return the model type, or the name of a model whose authors gave it the type of another one."""
    found = (_KINDS[name] for name in fields.texts("architectures") if name in _KINDS)
    return next(found, fields.text("model_type", ""))


def vision_section(fields: ConfigFields) -> ConfigFields | None:
    """Return the section of the vision tower.

    In the original configs of Phi, it has no sizes. In those of Molmo 2 and Chameleon, it has another name.
    """
    embeddings = fields.section("embd_layer")
    original = None if embeddings is None else embeddings.section("image_embd_layer")
    named = (fields.section(name) for name in _SECTIONS)
    return next((section for section in named if section is not None), original)
