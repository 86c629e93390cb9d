"""Modules of sentence-transformers that would change vectors are not ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.pooling.embedding import read_embedding_files
from engine.protocol.errors import CheckpointError

_MEAN = {"pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (
            ["Pooling", "Normalize"],
            _MEAN | {"include_prompt": False},
            "include_prompt must be true",
        ),
        (["Pooling"], {"pooling_mode": "max"}, "pooling_mode 'max' is not supported"),
        (["Pooling"], _MEAN | {"pooling_mode_cls_token": True}, "is not supported; use one of"),
        (["Normalize", "Pooling"], _MEAN, "a Pooling module after Dense or Normalize"),
        (["Pooling", "LayerNorm"], _MEAN, "LayerNorm' is not supported"),
    ],
)
def test_other_modules_are_refused(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any], message: str
) -> None:
    modules = [
        {"path": name, "type": f"sentence_transformers.models.{name}"}
        for name in ("Transformer", *kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps(pooling))
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    config = ConfigFields({"model_type": "bert", "hidden_size": 8}, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_embedding_files(tmp_path, config, config)
