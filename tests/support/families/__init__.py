"""Small random models of every family, in transformers."""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from support.families.compressed import WITH_ENTRIES
from support.families.dense import DENSE
from support.families.experts import WITH_EXPERTS
from support.families.indexers import WITH_INDEXERS
from support.families.multimodal import AUDIO_SIZES, MULTIMODAL, VISION_SIZES
from support.families.recurrent import RECURRENT

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = DENSE | WITH_EXPERTS | WITH_INDEXERS | WITH_ENTRIES | RECURRENT
"""The class of transformers and the differences from `SMALL`, by the name of a family."""

WITHOUT_CLASS = ("exaone", "internlm3", "iquestcoder", "sarvam_mla", "sarvam_moe")
"""Model types that transformers computes with classes of other families."""

WITH_TEXT_CONFIG = ("Gemma3n", "Gemma4", "Gemma4Unified")


def make_reference(name: str, **others: Any) -> Any:
    """Make a random transformers model in which every norm, bias and multiplier has an effect."""
    family, differences = CONFIGS[name]
    config_name = f"{family}Config" if family not in WITH_TEXT_CONFIG else f"{family}TextConfig"
    # A config keeps its values and changes some of them.
    values = copy.deepcopy(SMALL | differences | others)
    config = getattr(transformers, config_name)(**values)
    # Falcon's eager attention adds ALiBi twice.
    attention = "sdpa" if family == "Falcon" else "eager"
    suffix = "LMHeadModel" if family in ("CTRL", "GPT2", "OpenAIGPT") else "ForCausalLM"
    torch.manual_seed(0)
    model_class = getattr(transformers, family.removesuffix("Text") + suffix, None)
    if model_class is None:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    else:
        model = model_class._from_config(config, attn_implementation=attention)
    for parameter_name, parameter in model.named_parameters():
        if re.search(r"norm|\bln_|bias$", parameter_name):
            torch.nn.init.normal_(parameter, 0.8, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0, 0.15)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias", "balancing_biases")):
            torch.nn.init.normal_(buffer, 0, 0.3)
        if name.endswith("tid2eid"):
            for row in buffer:
                row.copy_(torch.randperm(model.config.n_routed_experts)[: len(row)])
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model.eval()


def make_multimodal(family: str, **others: Any) -> Any:
    """Make a random transformers model with a tower, by the name of its class."""
    model_type, differences = MULTIMODAL[family]
    config_class = getattr(transformers, f"{family}Config")
    text = SMALL | {"model_type": model_type} | differences | others
    parts = {}
    if family.startswith("Muse"):
        parts = {"out_hidden_size": 4 * VISION_SIZES["hidden_size"], "projector_hidden_size": 16}
    if family == "MuseSpark":
        parts["audio_config"] = AUDIO_SIZES | {"out_hidden_size": text["hidden_size"]}
    config = config_class(
        text_config=text,
        vision_config=VISION_SIZES
        | {
            "model_type": config_class().vision_config.model_type,
            "out_hidden_size": text["hidden_size"],
        },
        tie_word_embeddings=True,
        **parts,
    )
    if hasattr(config, "vision_feature_layer"):
        # The default ones are layers that the small tower lacks.
        config.vision_feature_layer = -1
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{family}ForConditionalGeneration")
    model = model_class._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0, 0.3)
    return model.eval()


def save_reference(reference: Any, path: Path) -> None:
    """Save a model with the architecture that published checkpoints have."""
    reference.save_pretrained(path)
    if reference.config.model_type in WITHOUT_CLASS:
        config = json.loads((path / "config.json").read_text())
        name = type(reference.config).__name__.removesuffix("Config")
        name = getattr(reference.config, "published_as", name)
        config["architectures"] = [f"{name}ForCausalLM"]
        (path / "config.json").write_text(json.dumps(config))


def save_multimodal(family: str, path: Path) -> Any:
    """Save a random multimodal model in the form in which it is published, and return it."""
    reference = make_multimodal(family)
    # Transformers renames layers of this decoder like those of the tower.
    is_original = family != "Kimi_K25"
    reference.save_pretrained(path, save_original_format=is_original)
    if family == "Kimi_K25":
        config = json.loads((path / "config.json").read_text())
        config["text_config"]["model_type"] = "kimi_k2"
        config["architectures"] = ["KimiK25ForConditionalGeneration"]
        (path / "config.json").write_text(json.dumps(config))
    return reference


def prompt(length, seed=0):
    return random.Random(seed).choices(range(SMALL["vocab_size"]), k=length)


def expected_logits(reference, tokens):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].float()


def assert_same(logits, expected):
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
