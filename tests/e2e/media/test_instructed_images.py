"""Models whose image encoder reads the text of the prompt answer as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.media.image_requests import ask_together, chat, picture
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from support.vision.instruct_blip import InstructBlip

torch.set_num_threads(1)
pytestmark = pytest.mark.sampled

FLAGS = ("--dtype", "float32", "--device", DEVICE, "--max-model-len", "128")
PICTURES = picture(1, 60, 40), picture(2, 24, 24)
TEXTS = ("seven wizards brew tea while the dog jumps", "the quick brown fox jumps over a lazy dog")
CHATS = [(image, text) for image in PICTURES for text in TEXTS]


def _ask(server: Server, chats: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    fields = {"logprobs": True, "top_logprobs": 3}
    return ask_together(server, [chat(*parts) | fields for parts in chats])


def _cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.mark.parametrize("decoder", ["llama", "opt", "t5"])
def test_answers_depend_on_image_and_text_as_in_transformers(tmp_path: Path, decoder: str) -> None:
    model = InstructBlip(tmp_path, decoder)
    with Server(str(tmp_path), *FLAGS) as server:
        alone = [_ask(server, [parts])[0] for parts in CHATS]
        together = _ask(server, CHATS * 2)
        status, refused = server.post("/v1/chat/completions", chat("the fox"))
        assert status == 400 and "send an image" in refused["error"]["message"]
        status, refused = server.post("/v1/completions", {"prompt": "fox", "max_tokens": 2})
        assert status == 400 and "needs an image" in refused["error"]["message"]
        status, refused = server.post("/v1/chat/completions", chat(*PICTURES, "fox"))
        assert status == 400 and "one image a prompt, not 2" in refused["error"]["message"]
        status, refused = server.post("/v1/chat/completions", chat(PICTURES[0], "a " * 90))
        assert status == 400 and "92 tokens of the image encoder" in refused["error"]["message"]
        assert_nothing_is_held(server)
    answers = [each["choices"][0] for each in alone]
    for answer, again in zip(together, answers * 2, strict=True):
        assert answer["choices"][0]["logprobs"] == again["logprobs"]
    for (image, text), answer, whole in zip(CHATS, answers, alone, strict=True):
        prompt, expected = model.logprobs(image, text, answer["token_ids"])
        assert whole["prompt_token_ids"] == prompt
        assert expected.argmax(-1).tolist() == answer["token_ids"]
        found = [each["logprob"] for each in answer["logprobs"]["content"]]
        torch.testing.assert_close(torch.tensor(found), expected.max(-1)[0], atol=1e-4, rtol=0)
    firsts = {answer["logprobs"]["content"][0]["logprob"] for answer in answers}
    assert len(firsts) == len(CHATS)


def test_a_prefix_is_cached_with_the_same_image_and_text_only(tmp_path: Path) -> None:
    InstructBlip(tmp_path, "llama")
    chats = [CHATS[0], CHATS[0], CHATS[1], CHATS[2]]
    with Server(str(tmp_path), *FLAGS) as server:
        answers = [_ask(server, [parts])[0] for parts in chats]
    assert [_cached(each) > 0 for each in answers] == [False, True, False, False]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]


def test_answers_survive_preemption_and_a_killed_worker(tmp_path: Path) -> None:
    InstructBlip(tmp_path, "llama")
    flags = (
        "-tp",
        "2",
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "16",
        "--inject-preemption",
        "0.2",
    )
    with Server(str(tmp_path), *FLAGS, *flags) as server:
        answers = _ask(server, CHATS * 2)
        server.child("worker 0").kill()
        answers += _ask(server, CHATS)
        server.wait_until_whole()
        assert server.metric("engine:num_preemptions_total") > 0
        assert_nothing_is_held(server)
    for index in range(len(CHATS)):
        same = [each["choices"][0]["token_ids"] for each in answers[index :: len(CHATS)]]
        assert same == same[:1] * 3
