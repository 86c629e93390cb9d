"""Models with drafting heads, and reference implementations of the heads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from engine.protocol.config import ProposerMethod, SpeculativeConfig
from safetensors.torch import load_file
from support.checkpoints.tiny import QWEN3, RECURRENT, random_model, sentencepiece_tokenizer
from support.drafts.draft_heads import (
    GEMMA4,
    Fusion,
    add_dflash_vocabulary,
    add_qwen3_5_layer,
    add_tensors,
    assistant_drafts,
    dflash_hidden_states,
    randomize,
    write_assistant,
    write_dflash,
    write_eagle3_head,
    write_eagle_head,
    write_speculators_head,
)
from support.gguf.writer import write_gguf
from support.workers.native_decoders import BLOCK_SIZE
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

NUM_DRAFTS = 3
SIZE = QWEN3["hidden_size"]
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
}


class Head(NamedTuple):
    """A model and a head for it: their directory, the settings, and the reference implementation."""

    model: transformers.PreTrainedModel
    path: Path
    speculative: SpeculativeConfig
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Returns the hidden states to choose a token from, and those for the next one, both [T, D].

    Its arguments are the embeddings of the next tokens and the hidden states of the model, both [T, D].
    """
    reads_unnormed: bool = False
    layers: tuple[int, ...] = ()
    """The layers of the model whose inputs the head reads side by side, in place of the hidden states at its end."""
    project: Callable[[Tensor], Tensor] = lambda states_TE: states_TE
    embed: Callable[[Tensor], Tensor] | None = None
    logits: Callable[[Tensor], Tensor] | None = None
    block_size: int = BLOCK_SIZE
    has_states: bool = False
    token_ids: Tensor | None = None
    """The tokens of the logits, if the head has an output projection of its own."""
    drafts: Callable[[list[int]], list[int]] | None = None
    """Returns the drafts after tokens, in place of `run`."""
    modules: Any = None
    """The modules of the head."""


def run_layer(
    layer: nn.Module, rope: nn.Module, hidden_TD: Tensor, window: int | None = None
) -> Tensor:
    count = len(hidden_TD)
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    if window is not None:
        mask = mask + torch.full((count, count), float("-inf")).tril(-window)
    embeddings = rope(hidden_TD[None], torch.arange(count)[None])
    output = layer(hidden_TD[None], attention_mask=mask, position_embeddings=embeddings)
    return (output[0] if isinstance(output, tuple) else output)[0]


def write_model(path: Path, config: str, model: str, fields: dict[str, Any]) -> Any:
    tokenizer = sentencepiece_tokenizer()
    made = random_model(config, model, QWEN3 | fields, tokenizer)
    made.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return made


def eagle(path: Path) -> Head:
    """An EAGLE head as published for Llama 3: `fc`, and a layer without input norm, in its own directory."""
    model = write_model(path, "LlamaConfig", "LlamaForCausalLM", {})
    return write_eagle(path, model, model.config)


def eagle_of_windowed_model(path: Path) -> Head:
    """An EAGLE head for a model in which all layers have a window, which also limits the head."""
    fields = {"sliding_window": 12}
    model = write_model(path, "MistralConfig", "MistralForCausalLM", fields)
    config = transformers.LlamaConfig(**QWEN3, vocab_size=model.config.vocab_size)
    return write_eagle(path, model, config, 12)


def write_eagle(
    path: Path, model: Any, config: transformers.LlamaConfig, window: int | None = None
) -> Head:
    head = path / "head"
    layer, fusion = write_eagle_head(head, config)
    rope = llama.LlamaRotaryEmbedding(config)

    def run(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        fused_TD = fusion(embedded_TD, hidden_TD, has_hidden_first=False)
        out = run_layer(layer, rope, fused_TD, window)
        return out, out

    return Head(model, path, SpeculativeConfig(3, ProposerMethod.EAGLE, model=str(head)), run)


def glm_mtp(path: Path) -> Head:
    """The layer behind the last one of GLM-4.5."""
    model = write_model(path, "Glm4MoeConfig", "Glm4MoeForCausalLM", EXPERTS)
    layer = glm.Glm4MoeDecoderLayer(model.config, 1)
    return write_last_layer(path, model, layer, glm.Glm4MoeRotaryEmbedding(model.config))


def deepseek_mtp(path: Path) -> Head:
    """The layer behind the last one of DeepSeek-V3, which has latent attention."""
    latent = {
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
        "head_dim": 8,
    }
    fields = {name: x for name, x in EXPERTS.items() if name != "use_qk_norm"} | latent
    model = write_model(path, "DeepseekV3Config", "DeepseekV3ForCausalLM", fields)
    layer = deepseek.DeepseekV3DecoderLayer(model.config, 1)
    return write_last_layer(path, model, layer, deepseek.DeepseekV3RotaryEmbedding(model.config))


def write_last_layer(path: Path, model: Any, layer: nn.Module, rope: nn.Module) -> Head:
    config, fusion = model.config, Fusion(SIZE, has_norms=True)
    norm = llama.LlamaRMSNorm(SIZE, config.rms_norm_eps)
    for module in (layer, fusion, norm):
        randomize(module)
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj"}
    start = f"model.layers.{config.num_hidden_layers}."
    tensors = {start + "shared_head.norm.weight": norm.weight.detach()}
    for name, tensor in fusion.state_dict().items():
        part, rest = name.split(".")
        tensors[f"{start}{names[part]}.{rest}"] = tensor
    for name, tensor in layer.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                tensors[f"{start}mlp.experts.{i}.gate_proj.weight"] = gate.clone()
                tensors[f"{start}mlp.experts.{i}.up_proj.weight"] = up.clone()
        elif name.endswith("experts.down_proj"):
            for i, each in enumerate(tensor):
                tensors[f"{start}mlp.experts.{i}.down_proj.weight"] = each.clone()
        else:
            tensors[start + name] = tensor
    tensors[start + "shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    tensors[start + "embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    add_tensors(path, tensors)

    def run(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        out = run_layer(layer, rope, fusion(embedded_TD, hidden_TD, has_hidden_first=False))
        return norm(out), norm(out) if config.model_type == "deepseek_v3" else out

    parts = (layer, fusion, norm)
    return Head(model, path, SpeculativeConfig(3, ProposerMethod.MTP), run, modules=parts)


def in_gguf(path: Path, head: Head, norm_offset: float = 0.0, *, is_alone: bool = False) -> Head:
    """Return the head with its model and its layer in a GGUF file, as llama.cpp's converter would write it.

    If it `is_alone`, the file has only that layer, and the model has other files.
    """
    model, parts = copy.deepcopy(head.model), copy.deepcopy(head.modules)
    layer, fusion, norm = parts
    layer.eh_proj = fusion.projection
    layer.shared_head = nn.Module()
    layer.enorm, layer.hnorm, layer.shared_head.norm = (
        fusion.embedding_norm,
        fusion.hidden_norm,
        norm,
    )
    with torch.no_grad():
        for each in (layer.enorm, layer.hnorm, norm):
            each.weight -= norm_offset
    if not norm_offset:
        # The converter keeps the copies that checkpoints of DeepSeek and GLM contain.
        layer.shared_head.head = copy.deepcopy(model.lm_head)
        layer.embed_tokens = copy.deepcopy(model.model.embed_tokens)
    if is_alone:
        model.model.layers = nn.ModuleList(nn.Module() for _ in model.model.layers)
    model.model.layers.append(layer)
    config = model.config
    if hasattr(config, "layer_types"):
        config.layer_types = [*config.layer_types, "full_attention"]
    config.num_hidden_layers += 1
    file = write_gguf(path / "model.gguf", model, num_prediction_layers=1)
    if is_alone:
        return head._replace(speculative=SpeculativeConfig(3, ProposerMethod.MTP, model=str(file)))
    return head._replace(path=file)


def glm_mtp_in_gguf(path: Path) -> Head:
    """The layer of GLM-4.5 in a GGUF file."""
    return in_gguf(path, glm_mtp(path))


def deepseek_mtp_in_gguf(path: Path) -> Head:
    """The layer of DeepSeek-V3 in a GGUF file, with the matrices of each head apart."""
    return in_gguf(path, deepseek_mtp(path))


def qwen3_5_mtp_in_gguf(path: Path) -> Head:
    """The layer of Qwen3.5 in a GGUF file, which has other names there."""
    return in_gguf(path, qwen3_5_mtp(path), norm_offset=1.0)


def qwen3_5_mtp_in_own_gguf(path: Path) -> Head:
    """The layer of Qwen3.5 in a GGUF file of its own."""
    head = qwen3_5_mtp(path / "model")
    return in_gguf(path, head, norm_offset=1.0, is_alone=True)


def mimo_mtp(path: Path) -> Head:
    """The layer of MiMo, which reads hidden states before the final norm."""
    model = write_model(path, "Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": False})
    config = model.config
    layer, fusion = qwen.Qwen2DecoderLayer(config, 0), Fusion(SIZE, has_norms=True)
    norm = llama.LlamaRMSNorm(SIZE, config.rms_norm_eps)
    for module in (layer, fusion, norm):
        randomize(module)
    fields = json.loads((path / "config.json").read_text())
    fields |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (path / "config.json").write_text(json.dumps(fields))
    names = {
        "embedding_norm": "token_layernorm",
        "hidden_norm": "hidden_layernorm",
        "projection": "input_proj",
    }
    start = "model.mtp_layers.0."
    tensors = {start + name: tensor for name, tensor in layer.state_dict().items()}
    tensors[start + "final_layernorm.weight"] = norm.weight.detach()
    for name, tensor in fusion.state_dict().items():
        part, rest = name.split(".")
        tensors[f"{start}{names[part]}.{rest}"] = tensor
    add_tensors(path, tensors)
    rope = qwen.Qwen2RotaryEmbedding(config)

    def run(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        out = norm(run_layer(layer, rope, fusion(embedded_TD, hidden_TD, has_hidden_first=True)))
        return out, out

    return Head(model, path, SpeculativeConfig(3, ProposerMethod.MTP), run, reads_unnormed=True)


def qwen3_5_mtp(path: Path) -> Head:
    """The layer of Qwen3-Next and Qwen3.5, models with recurrent layers, whose norms are stored as weight - 1."""
    config_class, model_class, differences = RECURRENT["delta net"]
    model = write_model(path, config_class, model_class, differences)
    config = model.config
    layer, fusion, norm = add_qwen3_5_layer(path, config)
    rope = qwen3_5.Qwen3_5TextRotaryEmbedding(config)

    def run(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        out = norm(run_layer(layer, rope, fusion(embedded_TD, hidden_TD, has_hidden_first=False)))
        return out, out

    return Head(
        model,
        path,
        SpeculativeConfig(3, ProposerMethod.MTP),
        run,
        block_size=96,
        has_states=True,
        modules=(layer, fusion, norm),
    )


def eagle3(path: Path) -> Head:
    """An EAGLE-3 head as published by its authors, which reads the layers that they chose."""
    model = write_model(path, "LlamaConfig", "LlamaForCausalLM", {"num_hidden_layers": 6})
    directory = path / "head"
    head = write_eagle3_head(directory, model.config, 120)
    return Head(
        model,
        path,
        SpeculativeConfig(3, ProposerMethod.EAGLE3, model=str(directory)),
        head.run,
        layers=(2, 3, 3),
        project=head.project,
        logits=head.logits,
        token_ids=head.token_ids,
    )


def eagle3_of_speculators(path: Path) -> Head:
    """A head with a different hidden size than the model, and with its own embedding."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {})
    directory, layers = path / "head", (0, 2)
    head, embedding_VD = write_speculators_head(directory, model.config, layers)
    return Head(
        model,
        path,
        SpeculativeConfig(3, ProposerMethod.EAGLE3, model=str(directory)),
        head.run,
        layers=layers,
        project=head.project,
        embed=lambda ids_T: embedding_VD[ids_T],
        logits=head.logits,
        token_ids=head.token_ids,
    )


def assistant(path: Path) -> Head:
    """The assistant of a Gemma 4 like E4B, whose last layers share keys and values, with clusters of tokens."""
    fields = GEMMA4 | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    return write_gemma4(path, fields, "Gemma4", has_clusters=True)


def unified_assistant(path: Path) -> Head:
    """The assistant of a Gemma 4 like 12B, whose full attention has fewer heads and uses keys as values."""
    fields = GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return write_gemma4(path, fields, "Gemma4Unified", has_clusters=False)


def write_gemma4(path: Path, fields: dict[str, Any], kind: str, *, has_clusters: bool) -> Head:
    model = write_model(path, f"{kind}TextConfig", f"{kind}ForCausalLM", fields)
    directory = path / "assistant"
    made = write_assistant(directory, model.config, fields, kind, has_clusters=has_clusters)
    return Head(
        model,
        path,
        SpeculativeConfig(3, ProposerMethod.MTP, model=str(directory)),
        lambda embedded_TD, hidden_TD: (embedded_TD, hidden_TD),
        drafts=lambda tokens: assistant_drafts(model, made, tokens, NUM_DRAFTS),
    )


def dflash(path: Path) -> Head:
    """A DFlash head as published by its authors, with full attention."""
    return make_dflash(path, ["full_attention"] * 3, has_published_names=True)


def dflash_with_windows(path: Path) -> Head:
    """A DFlash head as published for Muse Glimmer, some of whose layers have a window."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return make_dflash(path, kinds, has_published_names=False)


def dflash_with_causal_windows(path: Path) -> Head:
    """A DFlash head whose layers all have a window, in which tokens of a block do not attend to later ones."""
    kinds = ["sliding_attention"] * 3
    return make_dflash(path, kinds, has_published_names=True, causal_kinds=kinds[:1])


def dflash_with_some_causal_windows(path: Path) -> Head:
    """A DFlash head as published for Gemma 4: attention is causal only in the layers that have a window."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return make_dflash(path, kinds, has_published_names=True, causal_kinds=kinds[:1])


def dflash_of_speculators(path: Path) -> Head:
    """A DFlash head in the layout of Speculators, with an output projection of its own."""
    kinds = ["full_attention"] * 3
    return make_dflash(path, kinds, has_published_names=True, has_vocabulary=True)


def dflash_head(
    model: transformers.PreTrainedModel,
    path: Path,
    drafts: Callable[[list[int]], list[int]],
    modules: Any = None,
) -> Head:
    """Return the head in `path / "head"`, which reads the inputs of two layers of `model` and computes `drafts`."""
    return Head(
        model,
        path,
        SpeculativeConfig(NUM_DRAFTS, ProposerMethod.DFLASH, model=str(path / "head")),
        lambda embedded_TD, hidden_TD: (embedded_TD, hidden_TD),
        layers=(1, 3),
        drafts=drafts,
        modules=modules,
    )


def make_dflash(
    path: Path,
    layer_types: list[str],
    *,
    has_published_names: bool,
    has_vocabulary: bool = False,
    causal_kinds: Collection[str] = (),
) -> Head:
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 6})
    directory = path / "head"
    made = write_dflash(directory, layer_types, has_published_names=has_published_names)
    token_ids, matrix = torch.arange(model.config.vocab_size), model.lm_head.weight
    if has_vocabulary:
        token_ids = add_dflash_vocabulary(directory, model.config)
        matrix = load_file(directory / "model.safetensors")["lm_head.weight"]

    def drafts(tokens: list[int]) -> list[int]:
        hidden_TD = dflash_hidden_states(model, made, tokens, NUM_DRAFTS, causal_kinds=causal_kinds)
        return token_ids[(hidden_TD @ matrix.T).argmax(1)].tolist()

    return dflash_head(model, path, drafts, made)


HEADS = [
    *(eagle, eagle_of_windowed_model, eagle3, eagle3_of_speculators),
    *(glm_mtp, deepseek_mtp, mimo_mtp, qwen3_5_mtp),
    *(glm_mtp_in_gguf, deepseek_mtp_in_gguf, qwen3_5_mtp_in_gguf, qwen3_5_mtp_in_own_gguf),
    *(assistant, unified_assistant, dflash, dflash_with_windows, dflash_of_speculators),
    dflash_with_causal_windows,
    dflash_with_some_causal_windows,
]
