"""Heads propose what a plain implementation of them predicts, and change no token.

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
from engine.protocol.config import ProposerMethod, SpeculativeConfig
from engine.protocol.errors import CheckpointError, ConfigError
from safetensors.torch import load_file, save_file
from support.draft_heads import Fusion, randomize, write_eagle_head
from support.native_decoders import BLOCK_SIZE
from support.tiny_checkpoints import QWEN3, random_model, sentencepiece_tokenizer
from support.worker_steps import Steps
from torch import Tensor, nn
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen

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


def run_layer(layer: nn.Module, rope: nn.Module, hidden_TD: Tensor) -> Tensor:
    count = len(hidden_TD)
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    embeddings = rope(hidden_TD[None], torch.arange(count)[None])
    output = layer(hidden_TD[None], attention_mask=mask, position_embeddings=embeddings)
    return (output[0] if isinstance(output, tuple) else output)[0]


def add_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    file = path / "model.safetensors"
    save_file({name: t.contiguous() for name, t in {**load_file(file), **tensors}.items()}, file)


def write_model(path: Path, config: str, model: str, fields: dict[str, Any]) -> Any:
    tokenizer = sentencepiece_tokenizer()
    made = random_model(config, model, QWEN3 | fields, tokenizer)
    made.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return made


def eagle(path: Path) -> Head:
    """An EAGLE head as published for Llama 3: `fc`, and a layer without input norm, in a directory of its own."""
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
    """The layer behind the last one, as in GLM-4.5 and DeepSeek-V3."""
    model = write_model(path, "Glm4MoeConfig", "Glm4MoeForCausalLM", EXPERTS)
    config = model.config
    layer, fusion = glm.Glm4MoeDecoderLayer(config, 1), Fusion(SIZE, has_norms=True)
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
    rope = glm.Glm4MoeRotaryEmbedding(config)

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


@pytest.fixture(scope="module", params=[eagle, glm_mtp, mimo_mtp], ids=lambda make: make.__name__)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head:
    torch.manual_seed(7)
    return request.param(tmp_path_factory.mktemp(request.param.__name__))


@torch.no_grad()
def predict(head: Head, tokens: list[int]) -> list[int]:
    """Return the drafts after all tokens, of which the model has computed all but the last."""
    model = head.model
    embed = model.get_input_embeddings()
    states: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    normed_TD = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
    hook.remove()
    hidden_TD = states[-1][0] if head.reads_unnormed else normed_TD
    drafts: list[int] = []
    for _ in range(NUM_DRAFTS):
        embedded_TD = embed(torch.tensor([*tokens[1:], *drafts]))
        chosen_TD, next_TD = head.run(embedded_TD, hidden_TD)
        drafts.append(int(model.lm_head(chosen_TD[-1]).argmax()))
        hidden_TD = torch.cat((hidden_TD, next_TD[-1:]))
    return drafts


def plain_tokens(head: Head, count: int) -> list[int]:
    with torch.no_grad():
        tokens = head.model.generate(
            torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return tokens[0, len(PROMPT) :].tolist()


def test_drafts_are_those_of_the_reference(head: Head) -> None:
    """It holds after a prompt in two parts, wrong drafts, and right ones, which the test writes in their place."""
    expected = plain_tokens(head, 24)
    steps = Steps(head.path, head.model.config.vocab_size, BLOCK_SIZE, speculative=head.speculative)
    begin = steps.run(slots=[0], new=[steps.new(0, PROMPT)], chunks=[(0, 9)])
    assert begin.drafts is None
    result = steps.run(chunks=[(0, len(PROMPT) - 9)])
    tokens = int32_view(result.sampled_token_ids).tolist()
    for number in range(8):
        assert result.drafts is not None
        drafts = int32_view(result.drafts.token_ids).tolist()
        assert drafts == predict(head, PROMPT + tokens)
        following = expected[len(tokens) : len(tokens) + 2]
        written = {"draft_token_ids": int32_bytes(following)} if number % 2 else {}
        count = 2 if written else NUM_DRAFTS
        counts = int32_bytes([(0, count)])
        result = steps.run(chunks=[(0, count + 1)], drafts=counts, **written)
        sampled = int32_view(result.sampled_token_ids).tolist()
        assert len(sampled) == 3 or not written
        tokens += sampled
    assert tokens == expected[: len(tokens)]


def test_heads_that_do_not_fit_are_refused(head: Head, tmp_path: Path) -> None:
    other = SpeculativeConfig(3, ProposerMethod.MTP)
    if head.speculative.method is ProposerMethod.EAGLE:
        with pytest.raises(CheckpointError, match="no layer for multi-token prediction"):
            Steps(head.path, 300, BLOCK_SIZE, speculative=other)
        return
    wide = write_model(tmp_path, "LlamaConfig", "LlamaForCausalLM", {"hidden_size": 128})
    other = SpeculativeConfig(3, ProposerMethod.EAGLE, model=str(tmp_path))
    with pytest.raises(ConfigError, match="hidden size of 128, the model of 64"):
        Steps(head.path, wide.config.vocab_size, BLOCK_SIZE, speculative=other)
