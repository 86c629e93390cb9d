"""`--pooler-config` changes what a server returns for a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.checkpoints.tiny import qwen3_directory
from support.checkpoints.words_bert import bert_directory
from support.servers.server import Server


def rows_of(server: Server, **body: Any) -> Any:
    status, answer = server.post("/pooling", body)
    assert status == 200, answer
    return np.array(answer["data"][0]["data"], np.float32)


def test_the_pooler_config_chooses_a_task_and_the_size_of_vectors(tmp_path: Path) -> None:
    path, _ = qwen3_directory(tmp_path)
    prompt, flags = [5, 6, 7], ("--runner", "pooling", "--dtype", "float32")
    with Server(str(path), *flags) as server:
        rows = rows_of(server, input=prompt, task="token_embed", use_activation=False)
    flags += ("--pooler-config.task", "token_embed", "--pooler-config.dimensions", "16")
    with Server(str(path), *flags) as server:
        found = rows_of(server, input=prompt, use_activation=False)
        np.testing.assert_allclose(found, rows[:, :16], atol=1e-6)
        assert rows_of(server, input=prompt, dimensions=8).shape == (3, 8)
        body = {"input": [prompt, [8]], "use_activation": False}
        status, answer = server.post("/v1/embeddings", body)
        assert status == 200, answer
        first, second = (each["embedding"] for each in answer["data"])
        assert first == found.tolist() and np.shape(second) == (1, 16)
        # In llama.cpp's format, as with its flag --pooling none.
        status, answer = server.post("/embedding", {"content": prompt, "embd_normalize": -1})
        assert (status, answer) == (200, [{"index": 0, "embedding": first}])
        status, answer = server.post("/v1/embeddings", body | {"encoding_format": "base64"})
        assert (status, answer["error"]["param"]) == (400, "encoding_format")


def test_the_pooler_config_shifts_and_scales_the_scores_of_classes(tmp_path: Path) -> None:
    path, _ = bert_directory(tmp_path, 1)
    body = {"input": "tea", "use_activation": False}
    with Server(str(path)) as server:
        status, answer = server.post("/classify", body)
        assert status == 200, answer
        (score,) = answer["data"][0]["probs"]
    flags = ("--pooler-config.logit_mean", "0.5", "--pooler-config.logit_sigma", "2")
    with Server(str(path), *flags) as server:
        for use_activation in (False, True):
            body["use_activation"] = use_activation
            status, answer = server.post("/classify", body)
            assert status == 200, answer
            expected = (score - 0.5) / 2
            expected = 1 / (1 + np.exp(-expected)) if use_activation else expected
            np.testing.assert_allclose(answer["data"][0]["probs"], [expected], atol=1e-5)
