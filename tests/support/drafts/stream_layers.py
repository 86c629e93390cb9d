"""A layer for multi-token prediction that reads all residual streams of a model with hyper-connections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.protocol.config import ProposerMethod, SpeculativeConfig
from support.drafts.draft_heads import add_tensors, randomize
from support.drafts.models_with_heads import Head, run_layer, write_model
from support.families.recurrent import QWEN4
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama


class _StreamFusion(nn.Module):
    """The products that begin the layer of Qwen4, which reads all streams."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, count = config.hidden_size, config.hc_count
        self.pre_fc_norm_embedding = llama.LlamaRMSNorm(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = llama.LlamaRMSNorm(count * size, config.rms_norm_eps)
        self.fc_embedding, self.fc_hidden = (nn.Linear(size, size, bias=False) for _ in range(2))

    def forward(self, embedded_TD: Tensor, streams_TE: Tensor) -> Tensor:
        streams_TND = self.pre_fc_norm_hidden(streams_TE).unflatten(1, (-1, embedded_TD.shape[1]))
        embedded_TD = self.fc_embedding(self.pre_fc_norm_embedding(embedded_TD))
        return (self.fc_hidden(streams_TND) + embedded_TD.unsqueeze(1)).flatten(1)


def qwen4_mtp(path: Path) -> Head:
    """The layer of Qwen4, which reads all residual streams of the model."""
    fields = QWEN4 | {"hc_count": 2, "indexer_budget": 6, "tie_word_embeddings": False}
    kind = "Qwen4ExpTextConfig", "Qwen4ExpForCausalLM"
    model = write_model(path, *kind, fields)
    donor = write_model(path / "donor", *kind, fields)
    fusion = _StreamFusion(model.config)
    layer, mixer = donor.model.layers[1], donor.model.hyper_connection_mixer
    for module in (donor, fusion):
        randomize(module)
    tensors = {}
    for start, module in (("", fusion), ("layers.0.", layer), ("hyper_connection_mixer.", mixer)):
        for name, tensor in module.state_dict().items():
            offset = float("pre_fc_norm" in name)
            tensors[f"mtp.{start}{name}"] = tensor.detach() - offset
    add_tensors(path, tensors)

    def run(embedded_TD: Tensor, streams_TE: Tensor) -> tuple[Tensor, Tensor]:
        streams_TE = run_layer(layer, donor.model.rotary_emb, fusion(embedded_TD, streams_TE))
        return mixer(streams_TE), streams_TE

    return Head(
        model,
        path,
        SpeculativeConfig(3, ProposerMethod.MTP),
        run,
        reads_unnormed=True,
        block_size=96,
        has_states=True,
    )
