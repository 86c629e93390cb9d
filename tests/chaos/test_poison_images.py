"""An image that crashes the worker is identified, and requests with other images are not affected."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import transformers
from PIL import Image
from support.image_requests import chat, picture
from support.server import Server, assert_nothing_is_held
from support.vision_checkpoints import vision_directory

NUM_OTHERS = 8


def test_an_image_that_crashes_the_worker_fails_alone(tmp_path: Path) -> None:
    path, _ = vision_directory(tmp_path, "idefics3")
    # Only images with four columns of tiles have this token before one of them.
    crash = transformers.AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("<row_1_col_4>")
    flags = ("--dtype", "float32", "--device", "cpu", "--inject-crash", str(crash))
    poison = picture(50, 256, 60)
    images = [picture(seed, 40 + 4 * seed, 100) for seed in range(NUM_OTHERS)]

    def ask(image: Image.Image) -> tuple[int, Any]:
        return server.post("/v1/chat/completions", chat("the quick", image, "brown fox"))

    with Server(str(path), *flags) as server:
        undisturbed = [ask(image) for image in images]
        assert {status for status, _ in undisturbed} == {200}
        with concurrent.futures.ThreadPoolExecutor(NUM_OTHERS + 1) as pool:
            found = pool.submit(ask, poison)
            answers = list(pool.map(ask, images))
            status, answer = found.result()
        assert status == 500, answer
        assert "alone when another one crashed" in answer["error"]["message"]
        for (status, answer), (_, expected) in zip(answers, undisturbed, strict=True):
            assert status == 200, answer
            assert answer["choices"] == expected["choices"]
        assert server.log.count("was killed by SIGSEGV") == 2, server.log
        # It is refused from now on, without another crash.
        assert ask(poison)[0] == 500
        assert server.log.count("was killed by SIGSEGV") == 2, server.log
        assert_nothing_is_held(server)
