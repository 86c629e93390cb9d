"""The configuration of drafts."""

import json
from pathlib import Path

import pytest
from engine.frontend.cli.arguments import parse_settings
from engine.frontend.cli.engine_config import make_engine_config
from engine.frontend.model_source.options import ResolvedModel
from engine.protocol.config import (
    HiddenStatesConfig,
    ModelConfig,
    ProposerMethod,
    SpeculativeConfig,
)
from engine.protocol.config.hidden_states import StatesMode
from engine.protocol.config.scheduler import DEFAULT_SPECULATION
from engine.protocol.errors import CheckpointError, ConfigError


def test_hidden_states_are_configured_as_in_vllm_and_sglang() -> None:
    def states(*argv: str) -> HiddenStatesConfig | None:
        model = ModelConfig("m", "/m", "/m", ("m",), "llama", 32, 8192, (0,), hidden_size=4096)
        config = make_engine_config(
            parse_settings(["--device=cpu", *argv], {}), ResolvedModel(model, {}, 0, None), "/run"
        )
        assert config.kv_transfer is None
        return config.scheduler.hidden_states

    hf_config = {"eagle_aux_hidden_state_layer_ids": [9, 2, 2]}
    method = {"method": "extract_hidden_states", "draft_model_config": {"hf_config": hf_config}}
    extract = f"--speculative-config={json.dumps(method)}"
    extra = {"shared_storage_path": "/x/y", "use_synchronization_lock": False}
    connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_connector_extra_config": extra}
    transfer = f"--kv-transfer-config={json.dumps(connector)}"
    assert states() is None
    assert states("--enable-return-hidden-states") == HiddenStatesConfig()
    assert states("--return-hidden-states-mode=last") == HiddenStatesConfig(StatesMode.LAST)
    found = states(extract, transfer)
    assert found == HiddenStatesConfig(
        layers=(2, 9), directory="/x/y", use_synchronization_lock=False
    )
    for argv, problem in (
        ([extract], "needs --kv-transfer-config"),
        ([transfer], "needs the layers"),
        (["--hidden-states={}", "--max-num-batched-tokens=8193"], "must be at most 8192"),
        (["--hidden-states={}", "--device=null"], "needs a model"),
    ):
        with pytest.raises(ConfigError, match=problem):
            states(*argv)


def test_speculation_is_on_by_default_where_supported(tmp_path: Path) -> None:
    def drafts(*argv: str) -> SpeculativeConfig | None:
        model = ModelConfig("m", "/m", "/m", ("m",), "llama", 32, 8192, (0,))
        resolved = ResolvedModel(model, {}, 0, None)
        return make_engine_config(parse_settings(argv, {}), resolved, "/run").scheduler.speculative

    on, off = (
        '{"num_speculative_tokens": 5, "prompt_lookup_max": 4}',
        '{"num_speculative_tokens": 0}',
    )
    assert drafts("--device=cpu") == DEFAULT_SPECULATION
    assert drafts("--device=cpu", "-tp=2", "--speculative-config", on) == SpeculativeConfig(5)
    assert drafts("--device=cpu", "--speculative-config", off) is None
    of_model = json.dumps({"model": str(tmp_path), "num_speculative_tokens": 3})
    with pytest.raises(CheckpointError, match="neither a config"):
        drafts("--device=cpu", "--speculative-config", of_model)
    (tmp_path / "model.gguf").write_bytes(b"")
    found = drafts("--device=cpu", "--speculative-config", of_model)
    assert found == SpeculativeConfig(
        3, ProposerMethod.DRAFT_MODEL, model=str(tmp_path / "model.gguf")
    )
    for argv in (["--device=cuda"], ["--device=cpu", "-pp=2"]):
        assert drafts(*argv) is drafts(*argv, "--speculative-config", off) is None
    assert drafts("--device=cuda", "--speculative-config", on) == SpeculativeConfig(5)
    with pytest.raises(ConfigError, match="on GPUs needs --pipeline-parallel-size 1"):
        drafts("--device=cuda", "-pp=2", "--speculative-config", on)
    assert drafts("--device=cpu", "-pp=2", "--speculative-config", on) == SpeculativeConfig(5)
    assistant = tmp_path / "assistant"
    assistant.mkdir()
    (assistant / "model.safetensors").write_bytes(b"")
    config = {"architectures": ["Gemma4AssistantForCausalLM"]}
    (assistant / "config.json").write_text(json.dumps(config))
    # Without a method, the checkpoint says what it is.
    for method in ({"method": "mtp"}, {"method": "gemma4_mtp"}, {}):
        fields = json.dumps({"model": str(assistant), "num_speculative_tokens": 3} | method)
        for argv in (["--device=cpu", "-pp=2"], ["--device=cuda"]):
            assert drafts(*argv, "--speculative-config", fields) == SpeculativeConfig(
                3, ProposerMethod.MTP, model=str(assistant)
            )
    heads = {
        ProposerMethod.DFLASH: "DFlashDraftModel DFlashSpeculator MuseGlimmerAssistantModel Qwen3DSparkModel",
        ProposerMethod.EAGLE3: "LlamaForCausalLMEagle3 Eagle3DeepseekV2ForCausalLM PeagleQwen3ForCausalLM",
        ProposerMethod.EAGLE: "EagleLlamaForCausalLM EagleDeepSeekMTPModel",
    }
    for method, architectures in heads.items():
        for architecture in architectures.split():
            (assistant / "config.json").write_text(json.dumps({"architectures": [architecture]}))
            found = drafts("--device=cpu", "--speculative-config", fields)
            assert found is not None and found.method is method, architecture


def test_fields_of_vllm_that_change_no_answer_are_accepted() -> None:
    def read(**fields: object) -> SpeculativeConfig | None:
        text = json.dumps({"model": "d", **fields})
        found: SpeculativeConfig | None = parse_settings(("--speculative-config", text), {})[
            "scheduler"
        ]["speculative"]
        return found

    expected = SpeculativeConfig(3, ProposerMethod.EAGLE3, model="d")
    accepted = {
        "rejection_sample_method": "block",
        "use_heterogeneous_vocab": False,
        "synthetic_acceptance_length": None,
        "parallel_drafting": True,
        "enforce_eager": True,
        "quantization": "fp8",
        "num_speculative_tokens_per_batch_size": [[1, 4, 3]],
    }
    assert read(method="eagle3", num_speculative_tokens=3, **accepted) == expected
    # Without a number, there are as many as usual for the method.
    assert read(method="eagle3") == expected
    assert read(method="dspark") == SpeculativeConfig(7, ProposerMethod.DFLASH, model="d")
    assert read(method="eagle", revision="a") == SpeculativeConfig(
        3, ProposerMethod.EAGLE, model="d", revision="a"
    )
