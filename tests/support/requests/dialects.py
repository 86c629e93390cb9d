"""A server for clients of other APIs, and bodies for Anthropic's. The core repeats the last message."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from support.chat.shown_prompts import SCHEMA, TEMPLATE
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend

if TYPE_CHECKING:
    import anthropic

KEY = "sesame"
TOOLS = [{"name": "get_weather", "description": "Looks out.", "input_schema": SCHEMA}]


def dialect_frontend() -> AbstractContextManager[FrontendProcess]:
    return sound_frontend(
        step_s=0.0005,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        max_model_len=1024,
        chat_template=TEMPLATE,
        api_keys=(KEY,),
    )


def claude_client(frontend: FrontendProcess) -> anthropic.Anthropic:
    # This import takes three seconds, which other test processes need not wait for.
    import anthropic

    return anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{frontend.port}", api_key=KEY, max_retries=0
    )


def num_tokens(frontend: FrontendProcess, text: str) -> int:
    return len(frontend.tokenizer.encode(text))


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def options(frontend: FrontendProcess, text: str) -> dict:
    return {"model": MODEL, "max_tokens": num_tokens(frontend, text), "messages": user(text)}
