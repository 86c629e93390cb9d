"""Batches of conversations, prepared without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from engine.frontend.api.bodies.intake import Intake
from engine.frontend.api.routes import chat_completions
from engine.frontend.api.routes.chat_batch import ChatBatch
from engine.frontend.api.schema import BatchChatCompletionRequest
from engine.frontend.api.serving import Serving
from engine.frontend.chat import ModelTemplates, choose_formats
from engine.frontend.client.engine_client import EngineClient
from engine.frontend.store.client import StoreClient
from engine.protocol.config import SchedulerConfig, SpeculativeConfig
from support.servers.engine_fixtures import engine_config, on_event_loop, opened, smollm2_tokenizer


async def never() -> dict[str, Any]:
    raise AssertionError("the client sends nothing more")


@on_event_loop
async def test_conversations_of_a_batch_share_constraint_and_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = smollm2_tokenizer()
    scheduler = SchedulerConfig(speculative=SpeculativeConfig(8))
    config = engine_config(tmp_path, scheduler=scheduler)
    engine = opened(EngineClient(config, 0, tokenizer))
    templates = ModelTemplates(tokenizer)
    formats = choose_formats(config.frontend, templates.choose(with_tools=True))
    store = opened(StoreClient(config, 0))
    serving = Serving(config, tokenizer, templates, formats, engine, store)
    opened(serving.grammar_checks)
    calls: list[str] = []

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    async def accept(constraint: Any, receive: Any) -> Any:
        return constraint.structured_output

    monkeypatch.setattr(serving, "verify_constraint", accept)
    count(serving, "verify_constraint")
    for name in ("parse_constraint", "parse_tool_choice", "encode_prediction"):
        count(chat_completions, name)
    request = BatchChatCompletionRequest(
        messages=[[{"role": "user", "content": text}] for text in ("One", "Two", "Three")],
        response_format={"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}},
        prediction={"content": "4"},
    )
    batch = ChatBatch(serving, cast(Intake, None))
    prompts, _ = await batch.prepare(request, 100, cast(Any, never))
    assert len({id(prompt.params.structured_output) for prompt in prompts}) == 1
    assert len({id(prompt.predicted_token_ids) for prompt in prompts}) == 1
    assert len({prompt.token_ids.tobytes() for prompt in prompts}) == 3
    assert sorted(calls) == [
        "encode_prediction",
        "parse_constraint",
        "parse_tool_choice",
        "verify_constraint",
    ]
