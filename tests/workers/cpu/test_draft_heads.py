"""Heads propose the same drafts as a plain implementation, and change no token.

The references are written with the layers of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import CPUBackend, DeviceConfig, ProposerMethod, SpeculativeConfig
from engine.protocol.errors import CheckpointError, ConfigError
from engine.workers.execution import torch_loader
from safetensors.torch import load_file, save_file
from support.draft_heads import (
    GEMMA4,
    Fusion,
    add_qwen3_5_layer,
    add_tensors,
    assistant_drafts,
    randomize,
    write_assistant,
    write_eagle3_head,
    write_eagle_head,
    write_speculators_head,
)
from support.graph_attention import GraphTorchPaged
from support.host_accelerator import HostAccelerator
from support.native_decoders import BLOCK_SIZE
from support.tiny_checkpoints import QWEN3, RECURRENT, random_model, sentencepiece_tokenizer
from support.worker_steps import Steps
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

NUM_DRAFTS = 3
PROMPT = list(range(20, 37))
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


def run_layer(layer: nn.Module, rope: nn.Module, hidden_TD: Tensor) -> Tensor:
    count = len(hidden_TD)
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
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
    config = model.config
    head = path / "head"
    layer, fusion = write_eagle_head(head, config)
    rope = llama.LlamaRotaryEmbedding(config)

    def run(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        out = run_layer(layer, rope, fusion(embedded_TD, hidden_TD, has_hidden_first=False))
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
        return norm(out), out

    return Head(model, path, SpeculativeConfig(3, ProposerMethod.MTP), run)


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
        model, path, SpeculativeConfig(3, ProposerMethod.MTP), run, block_size=96, has_states=True
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


HEADS = [
    *(eagle, eagle3, eagle3_of_speculators),
    *(glm_mtp, deepseek_mtp, mimo_mtp, qwen3_5_mtp),
    *(assistant, unified_assistant),
]


@pytest.fixture(scope="module", params=HEADS, ids=lambda make: make.__name__)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head:
    torch.manual_seed(7)
    return request.param(tmp_path_factory.mktemp(request.param.__name__))


@torch.no_grad()
def read_states(head: Head, tokens: list[int]) -> Tensor:
    """Return the hidden states of the model that the head reads of all tokens, [T, E]."""
    model = head.model
    states: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    outputs = model.model(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    if head.layers:
        return torch.cat([outputs.hidden_states[layer][0] for layer in head.layers], 1)
    return states[-1][0] if head.reads_unnormed else outputs.last_hidden_state[0]


@torch.no_grad()
def predict(head: Head, tokens: list[int]) -> tuple[list[int], list[Tensor]]:
    """Return the drafts after all tokens, and their logits. The model has computed all tokens except the last."""
    if head.drafts is not None:
        return head.drafts(tokens), []
    embed = head.embed or head.model.get_input_embeddings()
    hidden_TD = head.project(read_states(head, tokens[:-1]))
    drafts: list[int] = []
    logits: list[Tensor] = []
    for _ in range(NUM_DRAFTS):
        embedded_TD = embed(torch.tensor([*tokens[1:], *drafts]))
        chosen_TD, next_TD = head.run(embedded_TD, hidden_TD)
        logits.append((head.logits or head.model.lm_head)(chosen_TD[-1]))
        best = logits[-1].argmax()
        drafts.append(int(best if head.token_ids is None else head.token_ids[best]))
        hidden_TD = torch.cat((hidden_TD, next_TD[-1:]))
    return drafts, logits


@pytest.fixture(params=["native", "torch", "device"])
def steps(request: pytest.FixtureRequest, head: Head, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """A runner of the model natively, in torch, and on a device, where the head also runs in torch."""
    accelerator = None
    if request.param == "device":
        accelerator = HostAccelerator()
        if not hasattr(head.model.config, "n_routed_experts") and head.drafts is None:
            # Experts in torch, and caches of layers with different heads, cannot be captured on a CPU.
            monkeypatch.setattr(torch_loader, "attention_backend", GraphTorchPaged)
    backend = CPUBackend.NATIVE if request.param == "native" else CPUBackend.TORCH
    device = DeviceConfig(cpu_backend=backend)
    vocab_size = head.model.config.vocab_size
    return Steps(
        head.path, vocab_size, head.block_size, device, accelerator, speculative=head.speculative
    )


def plain_tokens(head: Head, count: int) -> list[int]:
    with torch.no_grad():
        tokens = head.model.generate(
            torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return tokens[0, len(PROMPT) :].tolist()


def test_drafts_are_those_of_the_reference(
    head: Head, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds after a prompt in two parts, wrong drafts, and correct drafts that the test inserts."""
    expected = plain_tokens(head, 24)
    num_drafts = 0
    computed: list[Tensor] = []
    choose = steps.runner.model.choose_among

    def record(ids_C: Tensor, logits_SC: Tensor, *rows: Any) -> Tensor:
        computed.append(logits_SC[0].clone())
        return choose(ids_C, logits_SC, *rows)

    monkeypatch.setattr(steps.runner.model, "choose_among", record)
    begin = steps.run(slots=[0], new=[steps.new(0, PROMPT)], chunks=[(0, 9)])
    assert begin.drafts is None
    result = steps.run(chunks=[(0, len(PROMPT) - 9)])
    tokens = int32_view(result.sampled_token_ids).tolist()
    for number in range(8):
        drafts = [] if result.drafts is None else int32_view(result.drafts.token_ids).tolist()
        predicted, logits = predict(head, PROMPT + tokens)
        # Only the segments of a state, which are longer than all drafts here, leave fewer drafts.
        assert drafts == predicted[: len(drafts)]
        num_drafts += len(drafts)
        if head.logits is not None:
            torch.testing.assert_close(computed[-NUM_DRAFTS:], logits, rtol=1e-4, atol=1e-4)
        following = expected[len(tokens) : len(tokens) + 2]
        written = {"draft_token_ids": int32_bytes(following)} if number % 2 else {}
        count = 2 if written else NUM_DRAFTS
        counts = int32_bytes([(0, count)])
        result = steps.run(chunks=[(0, count + 1)], drafts=counts, **written)
        sampled = int32_view(result.sampled_token_ids).tolist()
        assert len(sampled) == 3 or not written or head.has_states
        tokens += sampled
    assert num_drafts == 8 * NUM_DRAFTS or (head.has_states and num_drafts > 4 * NUM_DRAFTS)
    assert tokens == expected[: len(tokens)]


def test_model_keeps_the_hidden_states_that_a_head_reads(head: Head, steps: Steps) -> None:
    steps.run(slots=[0], new=[steps.new(0, PROMPT)], chunks=[(0, len(PROMPT))])
    kept_TE = steps.runner.model.kept_hidden_TE
    size = head.model.config.hidden_size
    is_kept = head.layers or head.reads_unnormed
    states_TE = kept_TE[:, size:] if is_kept else kept_TE[:, :size]
    torch.testing.assert_close(states_TE, read_states(head, PROMPT), rtol=1e-4, atol=1e-4)


def test_drafting_heads_for_another_model_are_rejected(head: Head, tmp_path: Path) -> None:
    other = SpeculativeConfig(3, ProposerMethod.MTP)
    if head.speculative.method is ProposerMethod.EAGLE:
        with pytest.raises(CheckpointError, match="no multi-token prediction layer"):
            Steps(head.path, 300, BLOCK_SIZE, speculative=other)
        return
    wide = write_model(tmp_path, "LlamaConfig", "LlamaForCausalLM", {"hidden_size": 128})
    other = SpeculativeConfig(3, ProposerMethod.EAGLE, model=str(tmp_path))
    with pytest.raises(ConfigError, match="hidden size is 128, the model's is 64"):
        Steps(head.path, wide.config.vocab_size, head.block_size, speculative=other)


def test_assistants_of_another_model_are_refused(tmp_path: Path) -> None:
    head = assistant(tmp_path)
    file = tmp_path / "assistant" / "config.json"
    config = json.loads(file.read_text())
    other = write_model(tmp_path / "other", "LlamaConfig", "LlamaForCausalLM", {})
    for path, fields, error, reason in (
        (head.path, {"architectures": ["LlamaForCausalLM"]}, CheckpointError, "not an assistant"),
        (head.path, {"centroid_intermediate_top_k": 20}, CheckpointError, "20 of its 19 clusters"),
        (tmp_path / "other", {}, CheckpointError, "no layer of sliding attention"),
    ):
        file.write_text(json.dumps(config | fields))
        with pytest.raises(error, match=reason):
            Steps(path, other.config.vocab_size, BLOCK_SIZE, speculative=head.speculative)


def test_eagle3_heads_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    head = eagle3_of_speculators(tmp_path)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    no_embedding = {name: each for name, each in tensors.items() if name != "embed_tokens.weight"}
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for fields, changed, error, reason in (
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, CheckpointError, "Deepseek"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, {}, CheckpointError, r"0 to 3.*\[1, 9\]"),
        ({}, {"d2t": tensors["d2t"] + 1000}, ConfigError, "but the model's are 0 to"),
        ({}, {"fc.weight": torch.zeros(32, 7)}, ConfigError, r"\(32, 7\), not \(32, 128\)"),
        ({}, {"layers.0.extra.weight": torch.zeros(1)}, CheckpointError, "extra"),
        ({}, None, ConfigError, "hidden size is 32, the model's is 64"),
    ):
        (wrong / "config.json").write_text(json.dumps(config | fields))
        written = no_embedding if changed is None else tensors | changed
        save_file(written, wrong / "model.safetensors")
        speculative = SpeculativeConfig(3, ProposerMethod.EAGLE3, model=str(wrong))
        with pytest.raises(error, match=reason):
            Steps(head.path, head.model.config.vocab_size, BLOCK_SIZE, speculative=speculative)
