"""Find the kind of a model with a vision tower, and the section of the tower, in a config."""

from __future__ import annotations

from typing import Final

from .config_fields import ConfigFields

EMBEDDINGS: Final = "embd_layer"
"""The section that contains the tower in the original configs of Phi."""

SECTIONS: Final = ("vision_config", "vit_config", "img_processor", "vq_config")
"""The names of sections of vision towers, in the order of precedence."""

_KINDS: Final = {
    "BeeForConditionalGeneration": "bee",
    "DeepseekOCRForCausalLM": "deepseek_ocr",
    "Dots3NoteForCausalLM": "dots3_note",
    "Eagle2_5_VLForConditionalGeneration": "eagle_2_5_vl",
    "HCXVisionV2ForCausalLM": "hyperclovax_vision_v2",
    "LightOnOCRForConditionalGeneration": "lighton_ocr",
    "Llama_Nemotron_Nano_VL": "Llama_Nemotron_Nano_VL",
    "LocateAnythingForConditionalGeneration": "locateanything",
    "MiMoV2ForCausalLM": "mimo_v2",
    "MantisForConditionalGeneration": "mantis",
    "NemotronH_Omni_Reasoning_V3": "nemotron_h_omni",
    "OpenCUAForConditionalGeneration": "opencua",
    "Ovis2_6ForCausalLM": "ovis2_5",
    "Ovis2_6_MoeForCausalLM": "ovis2_5",
    "Ovis2_6_NextForCausalLM": "ovis2_5",
    "RForConditionalGeneration": "r_vl",
    "Step3VLForConditionalGeneration": "step3",
    "StepVLForConditionalGeneration": "step3_vl",
}
"""Architectures with the model type or the tower of another architecture, and the names of those models."""


def model_kind(fields: ConfigFields) -> str:
    """Return the model type, or the name of a model whose authors gave it the type of another one."""
    found = (_KINDS[name] for name in fields.texts("architectures") if name in _KINDS)
    return next(found, fields.text("model_type", ""))


def vision_section(fields: ConfigFields) -> ConfigFields | None:
    """Return the section of the vision tower.

    In the original configs of Phi, it has no sizes. In those of Molmo 2 and Chameleon, it has another name.
    """
    embeddings = fields.section(EMBEDDINGS)
    original = None if embeddings is None else embeddings.section("image_embd_layer")
    named = (fields.section(name) for name in SECTIONS)
    return next((section for section in named if section is not None), original)
