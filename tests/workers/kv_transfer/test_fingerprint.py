"""Fingerprints differ if a file or an option that changes the bytes of blocks differs, and only then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from engine.protocol.config import ModelConfig
from engine.workers.kv_transfer.fingerprint import hash_config_files

FILES = {
    "config.json": {
        "model_type": "llava",
        "text_config": {"rope_theta": 1e4},
        "vision_config": {"hidden_act": "gelu"},
        "quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    },
    "preprocessor_config.json": {"image_mean": [0.5, 0.5, 0.5]},
    "tokenizer_config.json": {"model_max_length": 512},
    "generation_config.json": {"temperature": 0.7},
    "tokenizer.json": {"model": {}},
}
CHANGES = [
    ("config.json", ("text_config", "rope_theta"), 1e6),
    ("config.json", ("vision_config", "hidden_act"), "silu"),
    ("config.json", ("quantization_config", "checkpoint_format"), "gptq_v2"),
    ("config.json", ("unknown_to_engine",), 3),
    ("preprocessor_config.json", ("image_mean",), [0.4, 0.4, 0.4]),
]
"""Changes of the bytes of blocks: a file, a field in it, and the new value."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name, content in FILES.items():
        (path / name).write_text(json.dumps(content))
    return path


def config_of(path: Path) -> ModelConfig:
    return ModelConfig("m", str(path), str(path), ("m",), "llava", 9, 9, (1,))


@pytest.mark.parametrize(("name", "field", "value"), CHANGES)
def test_a_changed_config_has_another_hash(directory, name, field, value):
    before = hash_config_files(config_of(directory))
    content = json.loads((directory / name).read_text())
    *sections, last = field
    section = content
    for each in sections:
        section = section[each]
    section[last] = value
    (directory / name).write_text(json.dumps(content))
    assert hash_config_files(config_of(directory)) != before


def test_options_that_replace_fields_have_another_hash(directory):
    config = config_of(directory)
    changed = msgspec.structs.replace(config, hf_overrides={"rope_theta": 1e6})
    assert hash_config_files(changed) != hash_config_files(config)


def test_only_code_that_is_trusted_is_part_of_the_hash(directory):
    config = config_of(directory)
    trusting = msgspec.structs.replace(config, trust_remote_code=True)
    before = hash_config_files(config), hash_config_files(trusting)
    (directory / "modeling.py").write_text("pass")
    assert hash_config_files(config) == before[0]
    assert hash_config_files(trusting) != before[1]


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "generation_config.json", "tokenizer.json"]
)
def test_the_tokenizer_and_sampling_defaults_change_no_block(directory, name):
    before = hash_config_files(config_of(directory))
    (directory / name).write_text("{}")
    assert hash_config_files(config_of(directory)) == before


def test_copies_of_a_model_in_other_directories_have_one_hash(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "copy")
    assert hash_config_files(config_of(directory)) == hash_config_files(
        config_of(tmp_path / "copy")
    )
