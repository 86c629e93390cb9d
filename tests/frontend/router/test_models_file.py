"""The file with the models of a router."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.frontend.router.models_file import read_models
from engine.protocol.errors import ConfigError

FILE = """
defaults:
  port: 1234
  api-key: [one]
  max-model-len: 64
models:
  chat:
    model: org/chat
    served-model-name: [chat-8b]
    enable-lora: true
    lora-modules: [poet=/adapters/poet]
  org/embed:
  long: {model: org/chat, max-model-len: 128}
"""


def test_each_model_has_the_defaults_and_its_own_options(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(FILE)
    config = read_models(str(tmp_path / "models.yaml"), {"port": 4321})
    assert (config.frontend.port, config.frontend.api_keys) == (4321, ("one",))
    chat, embed, long = config.models
    assert (chat.names, chat.adapters) == (("chat", "chat-8b"), ("poet",))
    assert embed.options == {"model": "org/embed", "api-key": ["one"], "max-model-len": 64}
    assert long.options["max-model-len"] == 128


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "must be a mapping"),
        ("models: {}", "at least one model"),
        ("models: [a]", "models: must be a mapping"),
        ("model: {a: }", '"model" must be models or defaults'),
        ("models: {a: {modl: x}}", "models: a: "),
        ("models: {a: {port: 1}}", "port must be in defaults"),
        ("models: {a: , b: {served-model-name: [a]}}", '"a" is the name of two models'),
        ("{", "invalid YAML"),
    ],
)
def test_invalid_files_name_the_place(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "models.yaml").write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_models(str(tmp_path / "models.yaml"), {})
