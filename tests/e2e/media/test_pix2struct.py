"""Pix2Struct, which reads an image in its own shape, answers as in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.frontend.model_source.config import resolve_model
from engine.frontend.model_source.options import ModelOptions
from engine.frontend.supervisor.console import Console
from engine.protocol.errors import CheckpointError
from PIL import Image
from support.media.image_requests import ask_together, chat, picture
from support.own_code.own_towers.pix2struct import Pix2Struct
from support.servers.server import DEVICE, Server, assert_nothing_is_held

torch.set_num_threads(1)
pytestmark = pytest.mark.sampled

FLAGS = ("--dtype", "float32", "--device", DEVICE, "--max-model-len", "100")
# Wide, high, larger and smaller than the patches that the model reads.
PICTURES = picture(1, 60, 40), picture(2, 5, 90), picture(3, 300, 4), picture(4, 200, 150)
CHATS: list[tuple[Image.Image, str]] = [
    (image, text) for image in PICTURES for text in ("", "the quick brown fox")
]


def _ask(server: Server, chats: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return ask_together(server, [chat(*parts) | {"logprobs": True} for parts in chats])


def _check(
    model: Pix2Struct,
    answers: list[dict[str, Any]],
    chats: list[tuple[Image.Image, str]] = CHATS,
) -> None:
    for (image, text), answer in zip(chats, answers, strict=True):
        choice = answer["choices"][0]
        prompt, expected = model.logprobs(image, text, choice["token_ids"])
        assert answer["prompt_token_ids"] == prompt
        assert expected.argmax(-1).tolist() == choice["token_ids"]
        found = [each["logprob"] for each in choice["logprobs"]["content"]]
        torch.testing.assert_close(torch.tensor(found), expected.max(-1)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_tied", [False, True])
def test_answers_to_images_of_any_shape_are_those_of_transformers(
    tmp_path: Path, is_tied: bool
) -> None:
    model = Pix2Struct(tmp_path, is_tied=is_tied)
    with Server(str(tmp_path), *FLAGS) as server:
        alone = [_ask(server, [parts])[0] for parts in CHATS]
        together = _ask(server, CHATS)
        status, refused = server.post("/v1/chat/completions", chat("the fox"))
        assert status == 400 and "send an image" in refused["error"]["message"]
        status, refused = server.post("/v1/completions", {"prompt": "fox", "max_tokens": 2})
        assert status == 400 and "needs an image" in refused["error"]["message"]
        status, refused = server.post("/v1/chat/completions", chat(*PICTURES[:2]))
        assert status == 400 and "one image a prompt, not 2" in refused["error"]["message"]
        assert_nothing_is_held(server)
    _check(model, alone)
    written = [[each["choices"][0]["token_ids"] for each in all_] for all_ in (alone, together)]
    assert written[0] == written[1]


def test_answers_survive_preemption_and_a_killed_worker(tmp_path: Path) -> None:
    model = Pix2Struct(tmp_path)
    with Server(str(tmp_path), *FLAGS, "-tp", "2", "--inject-preemption", "0.2") as server:
        answers = _ask(server, CHATS)
        server.child("worker 0").kill()
        again = _ask(server, CHATS)
        server.wait_until_whole()
        assert server.metric("engine:num_preemptions_total") > 0
        assert_nothing_is_held(server)
    _check(model, answers)
    _check(model, again)


def test_a_question_is_drawn_on_the_image_as_in_transformers(tmp_path: Path) -> None:
    model = Pix2Struct(tmp_path, is_vqa=True)
    texts = "What is in it?", "the quick brown fox jumps over a lazy dog, and then " * 3
    chats = [(image, text.strip()) for image in (PICTURES[0], PICTURES[3]) for text in texts]
    with Server(str(tmp_path), *FLAGS) as server:
        answers = _ask(server, chats)
        status, refused = server.post("/v1/chat/completions", chat(PICTURES[0]))
        assert status == 400 and "a text of 1 to 4096 characters" in refused["error"]["message"]
        status, refused = server.post("/v1/chat/completions", chat(picture(5, 1, 90), texts[1]))
        assert status == 400 and "the height may be at most" in refused["error"]["message"]
        assert_nothing_is_held(server)
    _check(model, answers, chats)
    (tmp_path / "Arial.TTF").unlink()
    with pytest.raises(CheckpointError, match="is_vqa needs a font"):
        resolve_model(ModelOptions(model=str(tmp_path)), Console())
