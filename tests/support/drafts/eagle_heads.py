"""Heads of EAGLE and EAGLE-3 for models of several families, with reference implementations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from engine.protocol.config import ProposerMethod, SpeculativeConfig
from safetensors.torch import save_file
from support.checkpoints.tiny import QWEN3
from support.drafts.draft_heads import EAGLE3_LAYER, Eagle3, Fusion, add_tensors, randomize
from support.drafts.models_with_heads import EXPERTS, NUM_DRAFTS, Head, run_layer, write_model
from torch import Tensor, nn
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.granite import modeling_granite as granite
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.mistral import modeling_mistral as mistral

SIZE = QWEN3["hidden_size"]
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def write_eagle_of(
    path: Path,
    kind: str,
    modules: dict[str, nn.Module],
    fields: dict[str, Any],
    config: transformers.PretrainedConfig,
    *,
    fusion: Fusion,
    norm: nn.Module | None = None,
    window: int | None = None,
) -> Head:
    """Write a head of `modules`, of which `layer` and `rope` compute its layer."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {})
    directory = path / "head"
    directory.mkdir()
    layer, rope = modules["layer"], modules["rope"]
    for module in (layer, fusion, *([] if norm is None else [norm])):
        randomize(module)
    names = fields.pop("names")
    tensors = {f"{names['layer']}.{name}": x for name, x in layer.state_dict().items()}
    for name, tensor in fusion.state_dict().items():
        part, rest = name.split(".")
        tensors[f"{names[part]}.{rest}"] = tensor
    if norm is not None:
        tensors |= {f"norm.{name}": tensor for name, tensor in norm.state_dict().items()}
    if kind == "EagleMiniCPMForCausalLM":
        tensors["norm.weight"] = torch.zeros(SIZE)
    save_file({k: x.contiguous() for k, x in tensors.items()}, directory / "model.safetensors")
    written = config.to_dict() | fields | {"architectures": [kind]}
    (directory / "config.json").write_text(json.dumps(written))

    def run(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        fused_TD = fusion(embedded_TD, hidden_TD, has_hidden_first=False)
        out = run_layer(layer, rope, fused_TD, window)
        out = out if norm is None else norm(out)
        return out, out

    speculative = SpeculativeConfig(3, ProposerMethod.EAGLE, model=str(directory))
    return Head(model, path, speculative, run)


def _sizes(config_class: type[transformers.PretrainedConfig], **fields: Any) -> Any:
    own = {"num_hidden_layers": 1, "vocab_size": 300, "attn_implementation": "eager"}
    return config_class(**{**QWEN3, **own, **fields})


_NAMES = {"layer": "layers.0", "projection": "fc"}


def eagle_of_cohere(path: Path) -> Head:
    """A head with a layer of Cohere, a final norm and a bias of the projection."""
    config = _sizes(transformers.CohereConfig, layer_norm_eps=1e-5)
    modules = {
        "layer": cohere.CohereDecoderLayer(config, 0),
        "rope": cohere.CohereRotaryEmbedding(config),
    }
    norm = cohere.CohereLayerNorm(hidden_size=SIZE, eps=1e-5)
    fusion = Fusion(SIZE, has_norms=False, has_bias=True)
    names = {"layer": "model.layers.0", "projection": "model.fc"}
    return write_eagle_of(
        path,
        "EagleCohereForCausalLM",
        modules,
        {"names": names, "model_type": "cohere"},
        config,
        fusion=fusion,
        norm=norm,
    )


def eagle_with_vocabulary(path: Path) -> Head:
    """A head with a layer of Llama, and an output projection in place of the model's."""
    config = _sizes(transformers.LlamaConfig)
    modules = {
        "layer": llama.LlamaDecoderLayer(config, 0),
        "rope": llama.LlamaRotaryEmbedding(config),
    }
    head = write_eagle_of(
        path,
        "EagleLlamaForCausalLM",
        modules,
        {"names": _NAMES},
        config,
        fusion=Fusion(SIZE, has_norms=False),
    )
    count = head.model.config.vocab_size
    matrix = 0.2 * torch.randn(count, SIZE)
    add_tensors(path / "head", {"lm_head.weight": matrix})
    written = json.loads((path / "head" / "config.json").read_text()) | {"vocab_size": count}
    (path / "head" / "config.json").write_text(json.dumps(written))
    return head._replace(
        logits=lambda hidden_TD: hidden_TD @ matrix.T, token_ids=torch.arange(count)
    )


def eagle_of_mistral(path: Path) -> Head:
    """A head with a layer of Mistral without an input norm, and a final norm."""
    config = _sizes(transformers.MistralConfig, sliding_window=None)
    layer = mistral.MistralDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    modules = {"layer": layer, "rope": mistral.MistralRotaryEmbedding(config)}
    return write_eagle_of(
        path,
        "EagleMistralForCausalLM",
        modules,
        {"names": _NAMES},
        config,
        fusion=Fusion(SIZE, has_norms=False),
        norm=llama.LlamaRMSNorm(SIZE, config.rms_norm_eps),
    )


def eagle_of_llama4(path: Path) -> Head:
    """A head with a layer of Llama 4 without experts."""
    config = _sizes(
        transformers.Llama4TextConfig,
        intermediate_size_mlp=96,
        moe_layers=[],
        use_qk_norm=False,
        attention_chunk_size=64,
    )
    modules = {
        "layer": llama4.Llama4TextDecoderLayer(config, 0),
        "rope": llama4.Llama4TextRotaryEmbedding(config),
    }
    return write_eagle_of(
        path,
        "EagleLlama4ForCausalLM",
        modules,
        {"names": _NAMES},
        config,
        fusion=Fusion(SIZE, has_norms=False),
        norm=llama.LlamaRMSNorm(SIZE, config.rms_norm_eps),
    )


def eagle_of_minicpm(path: Path) -> Head:
    """A head of MiniCPM: norms before the projection, scaled residuals, and a final norm that is not applied."""
    config = _sizes(
        transformers.GraniteConfig, residual_multiplier=1.4, attention_multiplier=16**-0.5
    )
    modules = {
        "layer": granite.GraniteDecoderLayer(config, 0),
        "rope": granite.GraniteRotaryEmbedding(config),
    }
    names = {
        "layer": "model.eagle_layers.0",
        "projection": "model.fc",
        "embedding_norm": "model.input_norm1",
        "hidden_norm": "model.input_norm2",
    }
    return write_eagle_of(
        path,
        "EagleMiniCPMForCausalLM",
        modules,
        {"names": names, "model_type": "minicpm", "scale_depth": 1.4, "scale_emb": 12},
        config,
        fusion=Fusion(SIZE, has_norms=True),
    )


def eagle_of_deepseek(path: Path) -> Head:
    """A head with a layer of DeepSeek-V3, which has latent attention, and norms before the projection."""
    fields = {name: x for name, x in EXPERTS.items() if name != "use_qk_norm"}
    config = _sizes(transformers.DeepseekV3Config, **fields, **LATENT)
    modules = {
        "layer": deepseek.DeepseekV3DecoderLayer(config, 0),
        "rope": deepseek.DeepseekV3RotaryEmbedding(config),
    }
    names = {**_NAMES, "embedding_norm": "enorm", "hidden_norm": "hnorm"}
    return write_eagle_of(
        path,
        "EagleDeepSeekMTPModel",
        modules,
        {"names": names},
        config,
        fusion=Fusion(SIZE, has_norms=True),
        norm=llama.LlamaRMSNorm(SIZE, config.rms_norm_eps),
    )


class NormedEagle3(Eagle3):
    """An EAGLE-3 head that norms what it reads, and reads its own normed hidden states; with the layer of Qwen3."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.states_norm = 1 + 0.1 * torch.randn(3 * SIZE)
        self.state_norms = 1 + 0.1 * torch.randn(3, SIZE)
        self.head_norms = {name: 1 + 0.1 * torch.randn(16) for name in "qk"}

    def project(self, states_TE: Tensor) -> Tensor:
        eps = self.config["rms_norm_eps"]
        normed = nn.functional.rms_norm(states_TE, (3 * SIZE,), self.states_norm, eps)
        parts = [
            nn.functional.rms_norm(part, (SIZE,), weight, eps)
            for part, weight in zip(normed.chunk(3, 1), self.state_norms, strict=True)
        ]
        return super().project(torch.cat(parts, 1))

    def run(self, embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        normed_TD, _ = super().run(embedded_TD, hidden_TD)
        return normed_TD, normed_TD

    def norm_head(self, name: str, x_THD: Tensor) -> Tensor:
        if name == "v":
            return x_THD
        return nn.functional.rms_norm(
            x_THD, (16,), self.head_norms[name], self.config["rms_norm_eps"]
        )


def eagle3_of_qwen3(path: Path) -> Head:
    """An EAGLE-3 head with the layer of Qwen3, norms of what it reads, and normed hidden states for its next pass."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 6})
    layer = {**EAGLE3_LAYER, "draft_vocab_size": 120}
    head = NormedEagle3(layer, model.config)
    tensors = head.weights | head.mapping
    tensors["input_norm.weight"] = head.states_norm
    tensors |= {f"fc_norm.{i}.weight": weight for i, weight in enumerate(head.state_norms)}
    tensors |= {f"midlayer.self_attn.{name}_norm.weight": x for name, x in head.head_norms.items()}
    fields = {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "vocab_size": model.config.vocab_size,
        "norm_output": True,
        "fc_norm": True,
        "eagle_config": {
            "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        },
    }
    return _write_eagle3(path, model, layer | fields, tensors, head, (1, 3, 5))


def eagle3_without_inner_states(path: Path) -> Head:
    """An EAGLE-3 head that reads the hidden states after the model's final norm, as that of GPT-OSS."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {})
    layer = {**EAGLE3_LAYER, "draft_vocab_size": 120}
    head = Eagle3(layer, model.config)
    tensors = head.weights | head.mapping
    del tensors["fc.weight"]
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": model.config.vocab_size,
        "eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []},
    }
    return _write_eagle3(path, model, layer | fields, tensors, head, ())


class LatentEagle3(Eagle3):
    """An EAGLE-3 head with latent attention."""

    def __init__(self, config: dict[str, Any], target: Any) -> None:
        super().__init__(config, target)
        own = transformers.DeepseekV3Config(**config, attn_implementation="eager")
        attention = deepseek.DeepseekV3Attention(own, 0)
        rank = own.kv_lora_rank + own.qk_rope_head_dim
        attention.q_a_proj = nn.Linear(2 * SIZE, own.q_lora_rank, bias=False)
        attention.kv_a_proj_with_mqa = nn.Linear(2 * SIZE, rank, bias=False)
        self.attention, self.rope = randomize(attention), deepseek.DeepseekV3RotaryEmbedding(own)
        start = "midlayer.self_attn."
        self.weights = {name: x for name, x in self.weights.items() if start not in name}
        self.weights |= {f"{start}{name}": x for name, x in attention.state_dict().items()}

    def attend(self, x_TE: Tensor) -> Tensor:
        return run_layer(_First(self.attention), self.rope, x_TE)


class _First(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        return self.module(x, **inputs)[0]


def eagle3_of_deepseek(path: Path) -> Head:
    """An EAGLE-3 head with a layer of DeepSeek-V3, as published for Kimi K2.5."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 6})
    fields = {name: x for name, x in EXPERTS.items() if name != "use_qk_norm"} | LATENT
    layer = {**EAGLE3_LAYER, **fields, "model_type": "deepseek_v3", "draft_vocab_size": 120}
    layer |= {"rope_scaling": None, "first_k_dense_replace": 0}
    head = LatentEagle3(layer, model.config)
    written = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "vocab_size": model.config.vocab_size,
    }
    tensors = head.weights | head.mapping
    return _write_eagle3(path, model, layer | written, tensors, head, (2, 3, 3))


def _write_eagle3(
    path: Path,
    model: Any,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    head: Eagle3,
    layers: tuple[int, ...],
) -> Head:
    directory = path / "head"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: x.contiguous() for k, x in tensors.items()}, directory / "model.safetensors")
    project: Callable[[Tensor], Tensor] = head.project if layers else lambda states: states
    return Head(
        model,
        path,
        SpeculativeConfig(3, ProposerMethod.EAGLE3, model=str(directory)),
        head.run,
        layers=layers,
        project=project,
        logits=head.logits,
        token_ids=head.token_ids,
    )


def parallel_eagle(path: Path) -> Head:
    """A P-EAGLE head: an EAGLE-3 head that computes all drafts in one pass."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 6})
    layer = {**EAGLE3_LAYER, "draft_vocab_size": 120}
    head = Eagle3(layer, model.config)
    mask_1E = torch.randn(1, 3 * SIZE)
    fields = {
        "architectures": ["PeagleLlamaForCausalLM"],
        "vocab_size": model.config.vocab_size,
        "pard_token": 7,
    }
    tensors = head.weights | head.mapping | {"mask_hidden": mask_1E}
    made = _write_eagle3(path, model, layer | fields, tensors, head, (2, 3, 3))

    @torch.no_grad()
    def drafts(tokens: list[int]) -> list[int]:
        outputs = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        states = torch.cat([outputs.hidden_states[layer][0] for layer in made.layers], 1)
        masks = mask_1E.expand(NUM_DRAFTS - 1, -1)
        ids = torch.tensor([*tokens[1:], *[7] * (NUM_DRAFTS - 1)])
        inputs = model.get_input_embeddings()(ids), head.project(torch.cat((states, masks)))
        logits = head.logits(head.run(*inputs)[0][-NUM_DRAFTS:])
        return head.token_ids[logits.argmax(1)].tolist()

    return made._replace(drafts=drafts, logits=None)


EAGLE_HEADS = [
    *(eagle_of_cohere, eagle_of_mistral, eagle_of_llama4, eagle_of_minicpm, eagle_of_deepseek),
    *(
        eagle_with_vocabulary,
        eagle3_of_qwen3,
        eagle3_without_inner_states,
        eagle3_of_deepseek,
        parallel_eagle,
    ),
]
