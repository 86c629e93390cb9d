"""Llama Nemotron Embed VL and Rerank VL, whose decoder's tokens attend to all of a query and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.model_source.images.read import read_image_processor
from engine.protocol.checkpoint.field_names import text_section
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.checkpoint.pooling.embedding import read_embedding_files
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.media.image_requests import data_url, picture
from support.own_code.known_towers import llama_nemotron_vl
from support.servers.server import Server, assert_nothing_is_held
from tokenizers.processors import TemplateProcessing

pytestmark = pytest.mark.sampled

IMAGE = picture(3, 60, 60)
PART = {"type": "image_url", "image_url": {"url": data_url(IMAGE)}}
TEXT = {"type": "text", "text": "brew tea"}
START, MARK, END = "<img>", "<IMG_CONTEXT>", "</img>"
SHOWN = f"{START}{MARK * 20}{END}"
"""The image in a prompt: four tiles and the whole image."""


class Reference:
    """The published model with its files in a directory."""

    def __init__(self, path: Path, score: torch.nn.Linear | None = None) -> None:
        tokenizer = sentencepiece_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": [START, MARK, END]})
        bos = ("<bos>", tokenizer.convert_tokens_to_ids("<bos>"))
        post = TemplateProcessing(single="<bos> $A", special_tokens=[bos])
        tokenizer.backend_tokenizer.post_processor = post
        tokenizer.save_pretrained(path)
        token = tokenizer.convert_tokens_to_ids(MARK)
        model = llama_nemotron_vl(path, vocab_size=len(tokenizer), image_token=token, score=score)
        config = read_model_config(path)
        text = text_section(config)
        assert text is not None
        processor = read_image_processor(path, config, text, {})
        assert processor is not None
        payloads = [x.payload for x in process_image(IMAGE, processor) if isinstance(x, Tile)]
        assert len(payloads) == 5
        self.config, self.text = config, text
        self._tokenizer, self._model, self._payloads = tokenizer, model, payloads

    def mean_state(self, prompt: str) -> torch.Tensor:
        ids = self._tokenizer(prompt)["input_ids"]
        return self._model.mean_state(ids, [self._payloads] if START in prompt else [])


@pytest.mark.parametrize("flags", [("-tp", "2"), ("--cpu-backend", "torch", "--chat-template")])
def test_pages_and_queries_have_the_vectors_of_the_model(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    reference = Reference(tmp_path)
    asked: list[tuple[str, list[Any], str]] = [
        ("query", [TEXT], "query: brew tea"),
        ("document", [TEXT, PART], f"passage: {SHOWN} brew tea"),
        ("user", [PART], f"{SHOWN} "),
    ]
    if "--chat-template" in flags:
        # A template that begins with BOS, as vLLM's for this model, which the tokenizer does not repeat.
        files = read_embedding_files(tmp_path, reference.text, reference.config)
        file = tmp_path / "own.jinja"
        file.write_text("{{ bos_token }}" + files.pooler.chat_template)
        flags += (str(file),)
    with Server(str(tmp_path), "--dtype", "float32", *flags) as server:
        for index, (role, content, prompt) in enumerate(asked):
            body = {"messages": [{"role": role, "content": content}]}
            status, answer = server.post("/v1/embeddings", body)
            assert status == 200, answer
            expected = torch.nn.functional.normalize(reference.mean_state(prompt), dim=0)
            vector = answer["data"][0]["embedding"]
            np.testing.assert_allclose(vector, expected, atol=1e-4)
            if index == 0:
                server.child("worker 0").kill()
        assert_nothing_is_held(server)


@pytest.mark.parametrize("flags", [("-tp", "2"), ("--cpu-backend", "torch")])
def test_queries_and_pages_have_the_scores_of_the_model(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    score = torch.nn.Linear(64, 1, bias=False)
    reference = Reference(tmp_path, score)
    documents: list[Any] = ["seven wizards", {"content": [TEXT, PART]}, {"content": [PART]}]
    asked = "question:the quick fox \n \n passage:"
    prompts = [f"{asked}seven wizards", f"{SHOWN} {asked}brew tea", f"{SHOWN} {asked}"]
    with Server(str(tmp_path), "--dtype", "float32", *flags) as server:
        body = {"text_1": "the quick fox", "text_2": documents, "use_activation": False}
        status, answer = server.post("/v1/score", body)
        assert status == 200, answer
        assert_nothing_is_held(server)
    with torch.inference_mode():
        expected = [score(reference.mean_state(prompt)).item() for prompt in prompts]
    np.testing.assert_allclose([x["score"] for x in answer["data"]], expected, atol=1e-4)
