"""The configuration of drafts."""

import json
from pathlib import Path

import pytest
from engine.frontend.cli.arguments import parse_settings
from engine.frontend.cli.engine_config import make_engine_config
from engine.frontend.model_source.options import ResolvedModel
from engine.protocol.config import ModelConfig, ProposerMethod, SpeculativeConfig
from engine.protocol.config.scheduler import DEFAULT_SPECULATION
from engine.protocol.errors import CheckpointError, ConfigError


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
    for architecture in ("DFlashDraftModel", "DFlashSpeculator", "MuseGlimmerAssistantModel"):
        (assistant / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        found = drafts("--device=cpu", "--speculative-config", fields)
        assert found is not None and found.method is ProposerMethod.DFLASH
