"""Receipts: the cost of a request, and the place where its prompt differs from a cached one.

The core repeats the last message.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.servers.frontend_process import MODEL, FrontendProcess

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"


def chat(system: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello there"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 3}


def test_receipt_names_the_first_difference() -> None:
    same = "You are an agent. The billing code is "
    with (
        FrontendProcess(step_s=0.0005, chat_template=TEMPLATE, api_keys=("a", "b")) as frontend,
        frontend.client("a") as client,
        frontend.client("b") as stranger,
    ):
        assert "engine" not in client.chat.completions.create(**chat(same + "17x.")).usage.to_dict()
        answer = client.chat.completions.with_raw_response.create(
            **chat(same + "18y."), extra_body={"include_receipt": True}
        )
        receipt = answer.parse().usage.to_dict()["engine"]
        num_tokens = answer.parse().usage.prompt_tokens
        place = f"first difference in message 0 at character {len(same) + 1}"
        assert receipt["prefix_match"] == f"0 of {num_tokens} tokens; {place}"
        assert receipt["request_id"] == answer.headers["x-request-id"]
        assert receipt["queue_ms"] >= 0 and receipt["decode_ms"] >= 0
        assert (receipt["preemptions"], receipt["accepted_draft_tokens"]) == (0, 0)

        response = client.responses.create(
            model=MODEL,
            instructions=same + "18y.",
            input="Hello you",
            extra_body={"include_receipt": True},
        )
        assert "in message 1 at character 6" in response.usage.to_dict()["engine"]["prefix_match"]

        chunks = list(
            stranger.chat.completions.create(
                **chat(same + "17x."),
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"include_receipt": True},
            )
        )
        # The prompts of other keys are not compared.
        assert "difference" not in chunks[-1].usage.to_dict()["engine"]["prefix_match"]
        batch = frontend.http.post(
            "/v1/chat/completions/batch",
            json=chat(same) | {"messages": [chat(same)["messages"]] * 2, "include_receipt": True},
            headers={"Authorization": "Bearer a"},
        ).json()
        assert batch["usage"]["engine"]["queue_ms"] >= 0
        whole = client.completions.create(
            model=MODEL, prompt="One two", max_tokens=2, extra_body={"include_receipt": True}
        )
        assert whole.usage.to_dict()["engine"]["prompt_tokens"] == whole.usage.prompt_tokens
