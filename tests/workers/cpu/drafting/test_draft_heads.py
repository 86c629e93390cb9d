"""Heads propose the same drafts as a plain implementation, and change no token.

The references are written with the layers of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import CPUBackend, DeviceConfig, ProposerMethod, SpeculativeConfig
from engine.protocol.errors import CheckpointError, ConfigError
from engine.workers.execution import torch_loader
from safetensors.torch import load_file, save_file
from support.drafts.dflash2_heads import dflash2
from support.drafts.draft_heads import dflash_hidden_states
from support.drafts.dspark_families import DSPARK_FAMILIES
from support.drafts.dspark_heads import DSPARK_HEADS
from support.drafts.eagle_heads import EAGLE_HEADS
from support.drafts.laguna_head import dflash_of_laguna
from support.drafts.layered_heads import LAYERED_HEADS
from support.drafts.models_with_heads import (
    HEADS,
    NUM_DRAFTS,
    Head,
    assistant,
    dflash,
    eagle3_of_speculators,
    write_model,
)
from support.drafts.multimodal_layers import MULTIMODAL_LAYERS
from support.drafts.prediction_layers import PREDICTION_LAYERS
from support.drafts.stream_layers import qwen4_mtp
from support.drafts.xpress_heads import xpress
from support.gpu.graph_attention import GraphTorchPaged
from support.gpu.host_accelerator import HostAccelerator
from support.workers.native_decoders import BLOCK_SIZE
from support.workers.worker_steps import Steps
from torch import Tensor

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

PROMPT = list(range(20, 37))


@pytest.fixture(
    scope="module",
    params=[
        *HEADS,
        *EAGLE_HEADS,
        *PREDICTION_LAYERS,
        *LAYERED_HEADS,
        *DSPARK_HEADS,
        *DSPARK_FAMILIES,
        *MULTIMODAL_LAYERS,
        dflash2,
        dflash_of_laguna,
        qwen4_mtp,
        xpress,
    ],
    ids=lambda make: make.__name__,
)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head:
    torch.manual_seed(7)
    return request.param(tmp_path_factory.mktemp(request.param.__name__))


@torch.no_grad()
def read_states(head: Head, tokens: list[int]) -> Tensor:
    """Return the hidden states of the model that the head reads of all tokens, [T, E]."""
    model = head.model
    states: list[Tensor] = []
    names = ("norm_f", "hyper_connection_mixer", "norm")
    norm = next(getattr(model.model, name) for name in names if hasattr(model.model, name))
    hook = norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
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
        experts = ("n_routed_experts", "num_experts", "moe_num_experts")
        has_experts = any(hasattr(head.model.config, name) for name in experts)
        if not has_experts and "assistant" not in head.path.name:
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
    size = head.model.config.hidden_size
    with pytest.raises(ConfigError, match=f"hidden size is 128, the model's is {size}"):
        Steps(head.path, wide.config.vocab_size, head.block_size, speculative=other)


def test_assistants_of_another_model_are_refused(tmp_path: Path) -> None:
    head = assistant(tmp_path)
    file = tmp_path / "assistant" / "config.json"
    config = json.loads(file.read_text())
    other = write_model(tmp_path / "other", "LlamaConfig", "LlamaForCausalLM", {})
    for path, fields, error, reason in (
        (head.path, {"architectures": ["LlamaForCausalLM"]}, CheckpointError, "no multi-token"),
        (head.path, {"centroid_intermediate_top_k": 20}, CheckpointError, "20 of its 19 clusters"),
        (tmp_path / "other", {}, CheckpointError, "no layer of sliding attention"),
    ):
        file.write_text(json.dumps(config | fields))
        with pytest.raises(error, match=reason):
            Steps(path, other.config.vocab_size, BLOCK_SIZE, speculative=head.speculative)


def test_a_block_of_drafts_is_not_longer_than_the_head_allows(tmp_path: Path) -> None:
    head = dflash(tmp_path)
    steps = Steps(
        head.path,
        head.model.config.vocab_size,
        BLOCK_SIZE,
        speculative=SpeculativeConfig(20, ProposerMethod.DFLASH, model=head.speculative.model),
    )
    result = steps.run(slots=[0], new=[steps.new(0, PROMPT)], chunks=[(0, len(PROMPT))])
    tokens = PROMPT + int32_view(result.sampled_token_ids).tolist()
    hidden_TD = dflash_hidden_states(head.model, head.modules, tokens, 7)
    expected = head.model.lm_head(hidden_TD).argmax(1).tolist()
    assert int32_view(result.drafts.token_ids).tolist() == expected


def test_dflash_heads_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    head = dflash(tmp_path)
    file = tmp_path / "head" / "config.json"
    config = json.loads(file.read_text())
    own = config["dflash_config"]
    for fields, reason in (
        (
            {"architectures": ["LiLiCorrDraftModel"]},
            "architecture 'LiLiCorrDraftModel' are not supported",
        ),
        ({"dflash_config": own | {"target_layer_ids": [0, 9]}}, r"0 to 5.*\[0, 9\]"),
        ({"dflash_config": own | {"mask_token_id": 9999}}, "mask_token_id.*9999"),
        ({"block_size": 1}, "block_size.*1"),
    ):
        file.write_text(json.dumps(config | fields))
        with pytest.raises(CheckpointError, match=reason):
            Steps(
                head.path,
                head.model.config.vocab_size,
                BLOCK_SIZE,
                speculative=head.speculative,
            )


def test_eagle3_heads_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    head = eagle3_of_speculators(tmp_path)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    no_embedding = {name: each for name, each in tensors.items() if name != "embed_tokens.weight"}
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for fields, changed, error, reason in (
        ({"architectures": ["Eagle3MptForCausalLM"]}, {}, CheckpointError, "Eagle3Mpt"),
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
