"""The settings of sentence-transformers for vectors and scores are applied or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.pooling.classification import read_classifier
from engine.protocol.checkpoint.pooling.embedding import read_embedding_files
from engine.protocol.config.model import Activation
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
        (["Pooling", "Normalize", "Dense"], _MEAN, "a Dense module after Normalize is not supp"),
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


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "identity",
        ),
        ({"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.ReLU"}}, None),
    ],
)
def test_scores_have_the_activation_of_the_config(
    tmp_path: Path, fields: dict[str, Any], activation: str | None
) -> None:
    config = ConfigFields({"architectures": ["BertForSequenceClassification"]} | fields, tmp_path)
    if activation is None:
        with pytest.raises(CheckpointError, match=r"activation\.ReLU' is not supported; supported"):
            read_classifier(config)
    else:
        found = read_classifier(config)
        assert found is not None and found.activation == Activation[activation.upper()]
