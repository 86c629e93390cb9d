"""Azure's OpenAI client, which names the model in the path."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest
from engine.protocol.config import StoreConfig
from support.servers.frontend_process import ECHO_TEMPLATE, sound_frontend

pytestmark = pytest.mark.slow

FIRST, SECOND = "first", "org/second"
KEY = "key"
MESSAGES = [{"role": "user", "content": "One two three four five"}]


def test_azure_client_chooses_the_model_by_deployment(tmp_path: Path) -> None:
    store = StoreConfig(path=str(tmp_path / "store.db"), resume_grace_s=20)
    names = {"served_names": (FIRST, SECOND), "chat_template": ECHO_TEMPLATE}
    with sound_frontend(api_keys=(KEY,), store=store, **names) as frontend:
        azure = openai.AzureOpenAI(
            azure_endpoint=f"http://127.0.0.1:{frontend.port}",
            api_version="2024-10-21",
            api_key=KEY,
            max_retries=0,
        )
        assert [model.id for model in azure.models.list()] == [FIRST, SECOND]
        chat = azure.chat.completions.create(model=SECOND, messages=MESSAGES, max_tokens=5)
        assert chat.choices[0].message.content
        assert azure.completions.create(model=FIRST, prompt="a", max_tokens=1).choices
        response = azure.responses.create(model=SECOND, input="a b", max_output_tokens=2)
        assert azure.responses.retrieve(response.id).id == response.id
        with pytest.raises(openai.NotFoundError, match='"absent" does not exist'):
            azure.completions.create(model="absent", prompt="a")
        path = "/openai/deployments/absent/audio/transcriptions"
        form = {"files": {"file": b"RIFF"}, "data": {"model": FIRST}, "headers": {"api-key": KEY}}
        refused = httpx.post(f"http://127.0.0.1:{frontend.port}{path}", **form)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
        with pytest.raises(openai.AuthenticationError):
            azure.with_options(api_key="other").models.list()


def test_a_stream_of_a_deployment_continues_with_its_model(tmp_path: Path) -> None:
    store = StoreConfig(path=str(tmp_path / "store.db"), resume_grace_s=20)
    names = {"served_names": (FIRST, SECOND), "chat_template": ECHO_TEMPLATE}
    with sound_frontend(store=store, **names) as frontend:
        path = f"/openai/deployments/{SECOND}/chat/completions?api-version=2024-10-21"
        # The name in the body is not that of a deployment, as in clients whose deployments have other names.
        body = {"model": "gpt-4o", "messages": MESSAGES, "stream": True, "max_tokens": 4}
        whole = frontend.post(path, **body).text
        event_id = next(line for line in whole.splitlines() if line.startswith("id: "))[4:]
        rest = frontend.http.post(path, content=b"{}", headers={"last-event-id": event_id})
        assert rest.status_code == 200 and rest.text.endswith("data: [DONE]\n\n"), rest.text
