"""Conversations refer to media that earlier ones have named, and rendered ones have hashes and places of media.

The media of an interaction are those of a chat.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from engine import LLM, SamplingParams
from engine.protocol.errors import ParameterError
from support.media.image_requests import NUM_TOKENS, chat, data_url, picture
from support.media.video_files import write_video
from support.servers.server import DEVICE, Server
from support.vision.models import Model

FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
SEVERAL = ("--api-server-count", "2", "--api-key", "one", "two", "--admin-api-key", "operator")
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
OPERATOR = {"authorization": "Bearer operator"}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), "smolvlm")


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Server]:
    with Server(str(model.path), *FLAGS, *SEVERAL) as server:
        yield server


def test_media_of_an_interaction_give_the_prompt_of_a_chat(server: Server) -> None:
    image, movie = data_url(picture(7, 100, 70)), write_video("mp4", "libx264", 45, (24, 40))
    clip = f"data:video/mp4;base64,{base64.b64encode(movie).decode()}"
    for kind, url in (("image", image), ("video", clip)):
        part = {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
        status, expected = server.post(PATH, chat(part, "fox"), headers=ONE)
        assert status == 200, expected
        head, _, data = url.partition(";base64,")
        given = [{"type": kind, "mime_type": head.removeprefix("data:"), "data": data}]
        config = {"max_output_tokens": 8}
        given.append({"type": "text", "text": "fox"})
        body = {"model": "tiny", "input": given, "generation_config": config}
        status, answer = server.post("/v1beta/interactions", body, headers=ONE)
        assert status == 200, answer
        assert answer["usage"]["total_input_tokens"] == len(expected["prompt_token_ids"])


def test_rendered_chats_have_the_hashes_and_places_of_media(server: Server) -> None:
    image = picture(1, 60, 40)
    video = {"type": "video", "video": [data_url(picture(seed, 64, 64)) for seed in (2, 3)]}
    body = chat("a", image, "b", video, image)
    status, answer = server.post(PATH, body, headers=ONE)
    assert status == 200, answer
    status, rendered = server.post(f"{PATH}/render", body, headers=ONE)
    assert status == 200, rendered
    token_ids, features = rendered["token_ids"], rendered["features"]
    assert token_ids == answer["prompt_token_ids"]
    hashes, places = features["mm_hashes"], features["mm_placeholders"]
    assert hashes.keys() == places.keys() == {"image", "video"}
    half = len(hashes["image"]) // 2
    assert hashes["image"][:half] == hashes["image"][half:]
    assert len(set(hashes["video"])) == len(hashes["video"]) == 2
    images = [(each["offset"], each["length"]) for each in places["image"]]
    assert images == sorted(images) and len({length for _, length in images}) == 1
    placed = {token_ids[offset] for offset, _ in images}
    assert len(placed) == 1 and placed.isdisjoint(token_ids[: images[0][0]])


@pytest.mark.parametrize(
    ("kind", "value", "empty"),
    [
        ("image_url", {"url": data_url(picture(4, 60, 40))}, None),
        ("image_url", {"url": data_url(picture(5, 40, 60))}, {"url": None}),
        ("video", [data_url(picture(seed, 64, 64)) for seed in (6, 7)], None),
    ],
)
def test_media_are_referred_to_by_uuid_at_any_api_server(
    server: Server, kind: str, value: Any, empty: Any
) -> None:
    def ask(*media: Any, headers: dict[str, str] = ONE) -> tuple[int, Any]:
        parts = ({"type": kind, kind: each, "uuid": "x"} for each in media)
        return server.post(PATH, chat("a", *parts), headers=headers)

    status, sent = ask(value, value)
    assert status == 200, sent
    for media in ((empty, empty), (value, empty), (empty, value)) * 3:
        status, again = ask(*media)
        assert status == 200, again
        assert again["prompt_token_ids"] == sent["prompt_token_ids"]
        assert again["choices"][0]["token_ids"] == sent["choices"][0]["token_ids"]
    status, refused = ask(empty, headers=TWO)
    problem = (
        f'must name media of type {kind} that this server has from an earlier request, got "x"'
    )
    assert status == 400 and problem in refused["error"]["message"]
    assert refused["error"]["param"] == "messages[0].content[1].uuid"
    for path, known in (("/reset_encoder_cache", True), ("/reset_mm_cache", False)):
        assert server.post(path, {}, headers=ONE)[0] == 403
        assert server.post(path, {}, headers=OPERATOR) == (200, {"success": True})
        assert ask(empty)[0] == (200 if known else 400)


def test_reference_to_a_video_may_choose_other_frames(server: Server) -> None:
    file = io.BytesIO()
    first, *others = (picture(seed, 64, 64) for seed in range(6))
    first.save(file, "GIF", save_all=True, append_images=others, duration=500)
    url = f"data:image/gif;base64,{base64.b64encode(file.getvalue()).decode()}"

    def ask(value: Any, **fields: Any) -> list[int]:
        part = {"type": "video_url", "video_url": value, **fields}
        status, answer = server.post(PATH, chat("a", part), headers=ONE)
        assert status == 200, answer
        return list(answer["prompt_token_ids"])

    two, four = (ask({"url": url, "num_frames": count}) for count in (2, 4))
    assert two != four
    assert ask({"url": url, "num_frames": 2}, uuid="v") == two
    for value, fields in (
        (None, {"num_frames": 4}),
        ({"num_frames": 4}, {}),
        ({"url": None, "num_frames": 4}, {}),
    ):
        assert ask(value, uuid="v", **fields) == four
    assert ask(None, uuid="v") == two
    assert ask(None, uuid="v", fps=1.0) == ask({"url": url, "fps": 1.0})


def test_offline_callers_refer_to_named_images(model: Model) -> None:
    image = picture(7, 100, 70)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def prompt(data: Any, names: Any) -> dict[str, Any]:
        text = "<image>fox" * (len(data) if isinstance(data, list) else 1)
        data = {"multi_modal_data": {"image": data}, "multi_modal_uuids": {"image": names}}
        return {"prompt": text, **data}

    def conversation(image: Any) -> list[dict[str, Any]]:
        part = {"type": "image_pil", "image_pil": image, "uuid": "x"}
        return [{"role": "user", "content": [part, {"type": "text", "text": "fox"}]}]

    with LLM(str(model.path), dtype="float32") as llm:
        pairs = (
            (llm.generate, prompt(image, "x"), prompt(None, "x")),
            (llm.generate, prompt([image] * 2, ["y", None]), prompt([None, image], ["y", None])),
            (llm.chat, conversation(image), conversation(None)),
        )
        for method, whole, named in pairs:
            first, second = (method(each, params)[0] for each in (whole, named))
            assert first.prompt_token_ids == second.prompt_token_ids
            assert first.outputs[0].token_ids == second.outputs[0].token_ids
        for data, names, problem in (
            (None, "z", 'must name media of type image of an earlier prompt, got "z"'),
            ([image, None], ["x"], "must have as many names as there are media, 2; got 1"),
        ):
            with pytest.raises(ParameterError, match=f"multi_modal_uuids.image {problem}"):
                llm.generate(prompt(data, names), params)
