"""Pictures, and requests that ask about them."""

from __future__ import annotations

import base64
import concurrent.futures
import io
from typing import Any

import numpy as np
from PIL import Image
from support.servers.server import Server

NUM_TOKENS = 12


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def data_url(image: Image.Image, file_format: str = "PNG") -> str:
    """Return an image as a data URL."""
    file = io.BytesIO()
    image.save(file, file_format)
    content = base64.b64encode(file.getvalue()).decode()
    return f"data:image/{file_format.lower()};base64,{content}"


def chat(*parts: str | Image.Image | dict[str, Any]) -> dict[str, Any]:
    """Return a request for the greedy answer to texts, images and other parts."""
    return {
        "messages": [{"role": "user", "content": [_content(part) for part in parts]}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _content(part: str | Image.Image | dict[str, Any]) -> dict[str, Any]:
    if isinstance(part, dict):
        return part
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_url(part), "detail": "auto"}}


def ask_together(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send chats at the same time, and return the answers."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, bodies))
