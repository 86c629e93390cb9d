"""Tensors that do not belong to the served model are refused by name before anything is received."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from engine.protocol.weights.transfer import ReceiveTensors, TransferError
from engine.workers.weight_transfer.group import TrainerGroup
from engine.workers.weight_transfer.staging import StagedWeights
from safetensors.numpy import save_file

EMBEDDING = "model.embed_tokens.weight"
NO_GROUP = cast(TrainerGroup, None)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    tensors = {EMBEDDING: np.zeros((4, 2), np.float32), "a.qweight": np.zeros(2, np.int32)}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "problem", "param"),
    [
        (["a.b"], ["float32"], [[1]], "there is no tensor 'a.b'", "names"),
        (["a.qweight"], ["float32"], [[2]], "'a.qweight' is quantized", "names"),
        ([EMBEDDING], ["int8"], [[4, 2]], "the type 'int8'", "dtypes"),
        ([EMBEDDING], ["float16"], [[2, 4]], r"the shape \[2, 4\], and \[4, 2\]", "shapes"),
        (["lm_head.weight"], ["float16"], [[4, 3]], r"'lm_head.weight' has the shape", "shapes"),
        ([EMBEDDING] * 2, ["float16"] * 2, [[4, 2]] * 2, "sent before in this update", "names"),
        ([EMBEDDING], [], [], "differ in number", "names"),
    ],
)
def test_wrong_tensor_is_refused(
    checkpoint: Path,
    tmp_path: Path,
    names: list[str],
    dtypes: list[str],
    shapes: list[list[int]],
    problem: str,
    param: str,
) -> None:
    staged = StagedWeights(tmp_path, checkpoint)
    with pytest.raises(TransferError, match=problem) as raised:
        staged.receive(NO_GROUP, ReceiveTensors(names, dtypes, shapes), 0)
    assert raised.value.param == param
    with pytest.raises(TransferError, match="no tensors were received"):
        staged.finish()


def test_quantized_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=r"quantized in a GGUF file, model\.gguf"):
        StagedWeights(tmp_path, tmp_path / "model.gguf")
