"""A model that reads all documents of a query in one prompt ranks them (jina-reranker-v3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import ParameterError
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import QWEN3, random_model, sentencepiece_tokenizer
from support.servers.server import Server, assert_nothing_is_held

LONG = QWEN3 | {"max_position_embeddings": 4096}
MARKS = ("<|embed_token|>", "<|rerank_token|>")
DOCUMENTS = ["the lazy fox.", "wizards brew tea!", "tea in the old tower <|embed_token|>."]


def write_ranker(path: Path) -> tuple[Any, torch.nn.Module, Any]:
    """Write a ranker, and return transformers' model, its projector and its tokenizer."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    model = random_model("Qwen3Config", "Qwen3ForCausalLM", LONG, tokenizer)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    size = QWEN3["hidden_size"]
    torch.manual_seed(3)
    projector = torch.nn.Sequential(
        torch.nn.Linear(size, size // 2, bias=False),
        torch.nn.ReLU(),
        torch.nn.Linear(size // 2, 24, bias=False),
    )
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"projector.{name}": x.detach() for name, x in projector.state_dict().items()}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["JinaForRanking"], "embedding_size": 24}
    (path / "config.json").write_text(json.dumps(config))
    return model, projector, tokenizer


def expected_prompt(query: str, documents: list[str], instruction: str = "") -> str:
    """Return the prompt of the model's authors."""
    passages = "\n".join(
        f'<passage id="{i}">\n{text.replace(MARKS[0], "")}{MARKS[0]}\n</passage>'
        for i, text in enumerate(documents)
    )
    asked = f"<instruct>\n{instruction}\n</instruct>\n" if instruction else ""
    return (
        "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on how "
        "relevant they are to the query. If the query is a question, how relevant a passage is depends on how well it "
        "answers the question. If not, try to analyze the intent of the query and assess how well each passage satisfies "
        "the intent. If an instruction is provided, you should follow the instruction when determining the ranking."
        f"<|im_end|>\n<|im_start|>user\nI will provide you with {len(documents)} passages, each indicated by a "
        f"numerical identifier. Rank the passages based on their relevance to query: {query}\n{asked}{passages}\n"
        f"<query>\n{query}{MARKS[1]}\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_documents_are_ranked_in_one_prompt(tmp_path: Path) -> None:
    model, projector, tokenizer = write_ranker(tmp_path)
    marks = tokenizer.convert_tokens_to_ids(list(MARKS))

    @torch.no_grad()
    def scores(*args: Any) -> list[float]:
        ids = torch.tensor([tokenizer(expected_prompt(*args))["input_ids"]])
        vectors = projector(model.model(ids).last_hidden_state[0])
        documents, query = (vectors[ids[0] == mark] for mark in marks)
        return torch.nn.functional.cosine_similarity(documents, query).tolist()

    query, flags = "seven wizards", ("--dtype", "float32", "--max-model-len", "4096")
    with Server(str(tmp_path), *flags) as server:
        for instruction in ("", "prefer tea"):
            body = {"query": query, "documents": DOCUMENTS}
            body |= {"instruction": instruction} if instruction else {}
            status, answer = server.post("/v1/rerank", body)
            assert status == 200, answer
            found = {each["index"]: each["relevance_score"] for each in answer["results"]}
            expected = scores(query, DOCUMENTS, instruction)
            np.testing.assert_allclose([found[i] for i in range(3)], expected, atol=1e-4)
        # Each of several queries has a prompt of its own.
        pairs = {"text_1": [query, "tea"], "text_2": DOCUMENTS[:2]}
        status, answer = server.post("/v1/score", pairs)
        assert status == 200, answer
        expected = [scores(query, DOCUMENTS[:1])[0], scores("tea", DOCUMENTS[1:2])[0]]
        np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=1e-4)
        for changes, words in (
            ({"truncate_prompt_tokens": 9}, "use max_tokens_per_doc"),
            ({"documents": ["tea " * 3000]}, "documents has"),
            ({"documents": [{"content": [{"type": "text", "text": "a"}]}]}, "must be a text"),
        ):
            status, answer = server.post(
                "/v1/rerank", {"query": query, "documents": DOCUMENTS} | changes
            )
            assert status == 400 and words in answer["error"]["message"], answer
        assert_nothing_is_held(server)
    with LLM(str(tmp_path), dtype="float32", max_model_len=4096) as llm:
        chosen = {"instruction": "prefer tea"}
        ranked = llm.score(query, DOCUMENTS, chat_template_kwargs=chosen)
        expected = scores(query, DOCUMENTS, "prefer tea")
        np.testing.assert_allclose([each.outputs.score for each in ranked], expected, atol=1e-4)
        pairs = llm.score([query, "tea"], DOCUMENTS[:2])
        expected = [scores(query, DOCUMENTS[:1])[0], scores("tea", DOCUMENTS[1:2])[0]]
        np.testing.assert_allclose([each.outputs.score for each in pairs], expected, atol=1e-4)
        with pytest.raises(ParameterError, match=r"text_2.*must be texts"):
            llm.score(query, [{"content": [{"type": "text", "text": "a"}]}])
