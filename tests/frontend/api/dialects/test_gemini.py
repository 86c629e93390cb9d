"""Google's Gemini API. The core repeats the last message, so a test says in it what the model writes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.chat.shown_prompts import ANSWER
from support.requests.chats import last_params
from support.requests.dialects import KEY, dialect_frontend, num_tokens
from support.servers.frontend_process import MODEL, FrontendProcess

pytestmark = pytest.mark.slow

HEADERS = {"x-goog-api-key": KEY}
PIXEL = {"mimeType": "image/png", "data": "AAAA"}
PARAMETERS = {"type": "OBJECT", "properties": {"city": {"type": "STRING", "maxLength": "9"}}}
TOOLS = [{"functionDeclarations": [{"name": "get_weather", "parameters": PARAMETERS}]}]


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with dialect_frontend() as process:
        yield process


def call(frontend: FrontendProcess, method: str, model: str = MODEL, **body: Any) -> Any:
    path = f"/v1beta/models/{model}:{method}"
    return frontend.http.post(path, json=body, headers=HEADERS)


def generate(frontend: FrontendProcess, text: str, config: dict | None = None, **body: Any) -> Any:
    given = {"maxOutputTokens": num_tokens(frontend, text)} | (config or {})
    body = {"contents": [{"parts": [{"text": text}]}], "generationConfig": given} | body
    return call(frontend, body.pop("method", "generateContent"), **body)


def test_gemini_answer_has_parts_and_usage(frontend: FrontendProcess) -> None:
    thinking = {"thinkingConfig": {"includeThoughts": True}}
    answer = generate(frontend, ANSWER, thinking, tools=TOOLS).json()
    [candidate] = answer["candidates"]
    thought, text, *calls = candidate["content"]["parts"]
    assert (thought["thought"], text["text"].strip()) == (True, "I look it up.")
    found = [(each["functionCall"]["name"], each["functionCall"]["args"]) for each in calls]
    assert found == [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})]
    usage = answer["usageMetadata"]
    assert usage["candidatesTokenCount"] + usage["thoughtsTokenCount"] == num_tokens(
        frontend, ANSWER
    )
    hidden = generate(frontend, ANSWER).json()["candidates"][0]["content"]["parts"]
    assert not any(part.get("thought") for part in hidden)
    for config, reason in (
        ({"maxOutputTokens": 2}, "MAX_TOKENS"),
        ({"stopSequences": [" three"]}, "STOP"),
    ):
        config |= {"candidateCount": 2, "topK": 40.0, "responseLogprobs": True, "logprobs": 1}
        first, second = generate(frontend, "One two three", config).json()["candidates"]
        assert first["content"] == {"role": "model", "parts": [{"text": "One two"}]}
        assert (first["finishReason"], second["index"]) == (reason, 1)
        assert len(first["logprobsResult"]["topCandidates"]) >= 2


def test_gemini_stream_has_the_same_parts(frontend: FrontendProcess) -> None:
    config = {"thinkingConfig": {"includeThoughts": True}}
    whole = generate(frontend, ANSWER, config, tools=TOOLS).json()
    stream = generate(frontend, ANSWER, config, tools=TOOLS, method="streamGenerateContent")
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line]
    parts = [part for e in events for part in e["candidates"][0]["content"]["parts"]]
    for is_thought in (True, False):
        texts, expected = (
            "".join(
                part["text"]
                for part in each
                if "text" in part and part.get("thought", False) == is_thought
            )
            for each in (parts, whole["candidates"][0]["content"]["parts"])
        )
        assert texts == expected != ""
    assert [part["functionCall"]["args"]["city"] for part in parts if "functionCall" in part] == [
        "Oslo",
        "Rome",
    ]
    assert events[-1]["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert events[-1]["usageMetadata"] == whole["usageMetadata"] | {
        "cachedContentTokenCount": events[-1]["usageMetadata"]["cachedContentTokenCount"]
    }


def test_gemini_conversation_reaches_the_template(frontend: FrontendProcess) -> None:
    note = {"mime_type": "text/plain", "data": base64.b64encode(b"Rain.").decode()}
    contents = [
        {"role": "user", "parts": [{"text": "Hi"}, {"inline_data": note}]},
        {"role": "model", "parts": [{"functionCall": {"name": "a", "args": {"x": 1}}}]},
        {"parts": [{"functionResponse": {"name": "a", "response": {"y": 2}}}]},
    ]
    system = {"parts": [{"text": "Be brief."}]}
    shown = '[system:Be brief.][user:Hi\nRain.][assistant:|call_0 a {"x": 1}][tool:{"y": 2}|call_0]'
    answer = generate(frontend, shown, contents=contents, system_instruction=system).json()
    assert answer["candidates"][0]["content"]["parts"][0]["text"] == shown
    counted = call(frontend, "countTokens", contents=contents, systemInstruction=system).json()
    assert counted["totalTokens"] == num_tokens(frontend, shown)


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        ({"responseMimeType": "application/json"}, ""),
        (
            {"responseMimeType": "application/json", "responseSchema": PARAMETERS},
            '"maxLength":9',
        ),
        (
            {"response_mime_type": "application/json", "responseJsonSchema": {"const": "Oslo"}},
            "Oslo",
        ),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"enum": ["red", "blue"]}},
            "blue",
        ),
    ],
)
def test_gemini_answer_may_have_a_format(
    frontend: FrontendProcess, config: dict, spec: str
) -> None:
    assert generate(frontend, "Hi", config).status_code == 200
    constraint = last_params(frontend).structured_output
    assert constraint is not None
    assert spec in constraint.spec.replace(" ", "")


@pytest.mark.parametrize(
    ("mode", "names", "is_forced"),
    [("ANY", [], True), ("ANY", ["get_weather"], True), ("AUTO", [], False), ("NONE", [], False)],
)
def test_gemini_functions_may_be_forced(
    frontend: FrontendProcess, mode: str, names: list[str], is_forced: bool
) -> None:
    config = {"functionCallingConfig": {"mode": mode, "allowedFunctionNames": names}}
    assert generate(frontend, "Hi", tools=TOOLS, toolConfig=config).status_code == 200
    assert (last_params(frontend).structured_output is not None) == is_forced


def test_gemini_models_are_shown_to_googles_clients(frontend: FrontendProcess) -> None:
    client = HEADERS | {"x-goog-api-client": "google-genai-sdk"}
    for path, headers in (("/v1beta/models", HEADERS), ("/v1/models", client)):
        models = frontend.http.get(path, headers=headers).json()["models"]
        assert f"models/{MODEL}" in [model["name"] for model in models]
        one = frontend.http.get(f"{path}/{MODEL}", headers=headers).json()
        assert one in models and "generateContent" in one["supportedGenerationMethods"]


@pytest.mark.parametrize(
    ("fields", "status", "problem"),
    [
        ({"model": "other"}, 404, 'The model "other" does not exist'),
        ({"contents": []}, 400, "contents is required"),
        ({"contents": [{"role": "x", "parts": []}]}, 400, "contents[0].role must be"),
        ({"contents": [{"parts": [{}]}]}, 400, "contents[0].parts[0] must have text"),
        ({"contents": {"parts": {"inlineData": PIXEL}}}, 400, "contents[0] must be"),
        ({"tools": [{"googleSearch": {}}]}, 400, "tools[0] must be functionDeclarations"),
        ({"generationConfig": {"topP": "x"}}, 400, "generationConfig.topP must be a number"),
        ({"generationConfig": {"stopSequences": [1]}}, 400, "generationConfig.stopSequences[0]"),
        ({"generationConfig": {"maxOutputTokens": True}}, 400, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"temperature": 10**400}}, 400, "generationConfig.temperature"),
        ({"generationConfig": {"topP": 7}}, 400, "generationConfig.topP must"),
        ({"cachedContent": "x"}, 400, "cachedContent names no stored content"),
    ],
)
def test_gemini_error_names_the_field(
    frontend: FrontendProcess, fields: dict, status: int, problem: str
) -> None:
    refused = generate(frontend, "Hi", **fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (status, status)
    assert error["status"] == {400: "INVALID_ARGUMENT", 404: "NOT_FOUND"}[status]
    assert error["message"].startswith(problem), error["message"]
