"""Bodies of requests to the Responses API, whose core repeats the last message."""

from __future__ import annotations

from typing import Any

from .frontend_process import MODEL, FrontendProcess
from .shown_prompts import SCHEMA

TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
FUNCTION: dict[str, Any] = {"type": "function", "name": "read"}
NAMESPACE: dict[str, Any] = {"type": "namespace", "name": "files", "tools": [FUNCTION]}


def num_tokens(frontend: FrontendProcess, text: str) -> int:
    return len(frontend.tokenizer.encode(text))


def options(frontend: FrontendProcess, text: str) -> dict[str, Any]:
    return {"model": MODEL, "max_output_tokens": num_tokens(frontend, text), "input": text}
