"""Models that also read images, with a layer for multi-token prediction. Their towers are not stored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from engine.protocol.config import ProposerMethod, SpeculativeConfig
from safetensors.torch import load_file
from support.drafts.draft_heads import Fusion, add_tensors, randomize
from support.drafts.models_with_heads import Head, run_layer
from support.drafts.prediction_layers import Names, write_prediction_layer
from support.families.published import PUBLISHED, make_reference, save_published
from support.families.published.kimi_k3 import as_kimi_k3
from torch import Tensor
from transformers.models.llama import modeling_llama as llama


def kimi_k3_mtp(path: Path) -> Head:
    """The layer of Kimi K3, which has latent attention and no attention residuals."""
    family = PUBLISHED["KimiK3"]
    model = save_published("KimiK3", path, num_nextn_predict_layers=1)
    donor = make_reference(family.base, **family.differences)
    as_kimi_k3(donor, has_residuals=False)
    randomize(donor)
    donor.save_pretrained(path / "donor")
    config = model.config
    start = "language_model.model.layers.5."
    fusion = Fusion(config.hidden_size, has_norms=True)
    norm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    for module in (fusion, norm):
        randomize(module)
    for module in (fusion.embedding_norm, fusion.hidden_norm):
        module.variance_epsilon = config.rms_norm_eps
    stored = load_file(path / "donor" / "model.safetensors")
    tensors = {
        re.sub(r"^model\.layers\.4\.", start, name): tensor
        for name, tensor in stored.items()
        if name.startswith("model.layers.4.")
    }
    tensors |= {
        f"{start}enorm.weight": fusion.embedding_norm.weight.detach(),
        f"{start}hnorm.weight": fusion.hidden_norm.weight.detach(),
        f"{start}eh_proj.weight": fusion.projection.weight.detach(),
        f"{start}shared_head.norm.weight": norm.weight.detach(),
        f"{start}shared_head.head.weight": model.lm_head.weight.detach(),
    }
    add_tensors(path, tensors)

    def run(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        fused_TD = fusion(embedded_TD, hidden_TD, has_hidden_first=False)
        out = run_layer(donor.model.layers[4], _no_rotation, fused_TD)
        return norm(out), out

    return Head(
        model,
        path,
        SpeculativeConfig(3, ProposerMethod.MTP),
        run,
        has_states=True,
        block_size=96,
    )


def exaone4_5_mtp(path: Path) -> Head:
    """The layer of EXAONE 4.5, which has a window, like the model's first layer."""
    names = Names(
        *("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
        {r"model\.layers\.0\.": "mtp.layers.0."},
    )
    fields = {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 9,
        "tie_word_embeddings": False,
    }
    head = write_prediction_layer(
        path,
        "Exaone4",
        fields,
        names,
        lambda donor, x: run_layer(donor.model.layers[0], donor.model.rotary_emb, x, 9),
    )
    text = json.loads((path / "config.json").read_text())
    architectures = ["Exaone4_5_ForConditionalGeneration"]
    config = {"architectures": architectures, "model_type": "exaone4_5", "text_config": text}
    (path / "config.json").write_text(json.dumps(config))
    return head


MULTIMODAL_LAYERS = [kimi_k3_mtp, exaone4_5_mtp]


def _no_rotation(*_: Any) -> None:
    return None
