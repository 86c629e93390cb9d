"""Fill-in-the-middle prompts of completions, of Ollama's API and of llama.cpp's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from engine.frontend.tokenizer.converted import tokenizer_json_path
from support.servers.frontend_process import FrontendProcess
from support.servers.server import default_model

pytestmark = pytest.mark.slow


def test_suffix_puts_the_texts_between_the_tokens_of_the_model(tmp_path: Path) -> None:
    names = (
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    )
    original = tokenizer_json_path(default_model())
    shutil.copytree(original.parent, tmp_path, dirs_exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(original))
    tokenizer.add_special_tokens(list(names))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    begin, end = "def add(a, b):\n", "\n    return c"
    prompt = f"{names[0]}{begin}{names[1]}{end}{names[2]}"
    with FrontendProcess(tokenizer_path=str(tmp_path)) as frontend:
        count = len(frontend.tokenizer.encode(prompt))
        fields = {"max_tokens": count, "skip_special_tokens": False}
        answer = frontend.complete(begin, suffix=end, **fields)
        # The core repeats the prompt.
        assert answer["choices"][0]["text"] == prompt
        pad = frontend.tokenizer.token_to_id(names[3])
        added = [m for m in frontend.core.received if hasattr(m, "requests")][-1]
        assert pad in added.requests[0].sampling_params.stop_token_ids
        body = {"prompt": begin, "suffix": end, "stream": False, "options": {"num_predict": count}}
        response = frontend.post("/api/generate", **body)
        assert response.json()["response"] == begin + end
        [card, *_] = frontend.http.get("/api/tags").json()["models"]
        assert "insert" in card["capabilities"]
        # Mistral's route answers like a chat, and its clients get its words for models.
        fim = {"prompt": begin, "suffix": end, "max_tokens": count}
        answer = frontend.post("/v1/fim/completions", **fim).json()
        [choice] = answer["choices"]
        assert (answer["object"], choice["message"]["content"]) == ("chat.completion", begin + end)
        streamed = frontend.post("/v1/fim/completions", **fim, stream=True).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in streamed[:-2]]
        pieces = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
        assert "".join(pieces) == begin + end
        assert chunks[-1]["usage"]["prompt_tokens"] == count
        headers = {"user-agent": "mistral-client-python/3.0"}
        [card, *_] = frontend.http.get("/v1/models", headers=headers).json()["data"]
        assert (card["type"], card["capabilities"]["completion_fim"]) == ("base", True)
        # llama.cpp's route may name other files, and cuts what does not fit.
        files = [{"filename": "x.py", "text": "c = 1"}]
        infill = {"input_prefix": begin, "input_suffix": end, "n_predict": 1}
        response = frontend.post("/infill", **infill, prompt="    c", input_extra=files)
        start = f"{names[4]}project\n{names[5]}x.py\nc = 1\n{names[5]}current\n"
        shown = f"{start}{names[0]}{begin}    c{names[1]}{end}{names[2]}"
        assert response.json()["prompt"] == shown
        long = {"input_prefix": "a b " * 500, "input_suffix": "y z " * 500, "n_predict": 12}
        answer = frontend.post("/infill", **long, input_extra=files).json()
        assert 480 <= answer["tokens_evaluated"] <= 500
        assert answer["prompt"].startswith(names[0]) and answer["prompt"].endswith(names[2])
        for wrong in ({}, {"text": "x", "filename": 1}, {"text": 3}):
            response = frontend.post("/infill", **infill, input_extra=[wrong])
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"].startswith("input_extra[0].")
        response = frontend.post("/v1/completions", prompt=[1, 2], suffix=end)
        assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
