"""Rendered conversations have the hashes and places of their images and videos."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.image_models import Model
from support.image_requests import chat, data_url, picture
from support.server import DEVICE, Server

FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = Model(tmp_path_factory.mktemp("model"), "smolvlm")
    with Server(str(model.path), *FLAGS) as server:
        yield server


def test_rendered_chats_have_the_hashes_and_places_of_media(server: Server) -> None:
    image = picture(1, 60, 40)
    video = {"type": "video", "video": [data_url(picture(seed, 64, 64)) for seed in (2, 3)]}
    body = chat("a", image, "b", video, image)
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    status, rendered = server.post("/v1/chat/completions/render", body)
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
