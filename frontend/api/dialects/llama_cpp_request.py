"""Translate requests of llama.cpp's own API to completion requests.

The API is described at https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from ...http.errors import bad_request, expect, expect_text, wrong
from ...tokenizer.tokenizer import Tokenizer
from ..logprobs import Json
from ..numbers import parse_number
from ..prompts import Prompt, parse_mixed, parse_object, verify_num_sequences
from ..sampling import PENALTIES_OFF
from ..schema import UNLIMITED, CompletionRequest, SamplerFields
from ..schema.llama_cpp import LlamaCompletionRequest, LlamaFields, LlamaInfillRequest

Part: TypeAlias = str | int

_PLAIN: Final = (
    "model",
    "stream",
    *SamplerFields.__struct_fields__,
    "ignore_eos",
    "grammar",
    "json_schema",
    "lora",
    "user",
    "priority",
    "cache_salt",
)
"""Fields that completion requests have too, with the same meaning."""

_NAMES: Final = {
    "max_tokens": "n_predict",
    "n": "n_cmpl",
    "logprobs": "n_probs",
}
"""Field of a completion request -> the field of llama.cpp that sets it."""

MAX_BIAS: Final = 100.0
"""The largest effective bias of a token. The bias `false` is its negative."""


class LlamaPrompt(CompletionRequest, kw_only=True):
    """A completion request from llama.cpp's API.

    `prompts` are texts, lists of token ids and texts, or objects with a text and its media. The fields of an `infill`
    replace them. If `is_list`, the answer is a list. If `only_computes_prompt`, the answer has no text.
    """

    prompts: list[str | list[Part] | Json] = msgspec.field(default_factory=list)
    infill: LlamaInfillRequest | None = None
    is_list: bool = False
    only_computes_prompt: bool = False
    return_tokens: bool = False
    response_fields: list[str] | None = None
    post_sampling_probs: bool = False

    def sent_name(self, name: str) -> str:
        """Return the name of a field in llama.cpp's API."""
        return _NAMES.get(name) or super().sent_name(name)


def translate(body: LlamaFields, tokenizer: Tokenizer) -> LlamaPrompt:
    """Return the body translated to a completion request. Raise APIError 400 if a field is invalid or not supported."""
    fields: Json = {name: getattr(body, name) for name in _PLAIN}
    n_predict = body.n_predict if body.n_predict is not None else body.max_tokens
    if n_predict is None or n_predict < 0:
        n_predict = UNLIMITED
    if fields["temperature"] is not None:
        # Negative temperatures are greedy.
        fields["temperature"] = max(fields["temperature"], 0.0)
    if body.repeat_last_n == 0:
        fields |= PENALTIES_OFF
    else:
        fields["repeat_penalty"] = body.repeat_penalty
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    prompts, is_list = _prompts(body)
    return LlamaPrompt(
        **fields,
        max_tokens=n_predict or 1,
        n=body.n_cmpl if body.n_cmpl is not None else body.n,
        seed=None if body.seed == -1 else body.seed,
        stop=[text for text in stop or () if text] or None,
        logit_bias=_logit_bias(body.logit_bias, tokenizer),
        logprobs=body.n_probs or None,
        prompts=prompts,
        infill=body if isinstance(body, LlamaInfillRequest) else None,
        is_list=is_list,
        only_computes_prompt=n_predict == 0,
        return_tokens=bool(body.return_tokens),
        response_fields=body.response_fields,
        timings_per_token=bool(body.timings_per_token),
        return_progress=body.return_progress,
        post_sampling_probs=bool(body.post_sampling_probs),
    )


def encode_prompts(request: LlamaPrompt, tokenizer: Tokenizer, vocab_size: int) -> list[Prompt]:
    """Return the prompts. Those that are one text are not encoded yet.

    Raises:
        APIError: A prompt has no tokens, a token that is not in the vocabulary, or media that do not match its text
            (400).
    """

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens))

    encoded = []
    for i, prompt in enumerate(request.prompts):
        param = f"prompt[{i}]" if len(request.prompts) > 1 else "prompt"
        if isinstance(prompt, str):
            encoded.append(Prompt(param, prompt, np.empty(0, np.int32)))
            continue
        if isinstance(prompt, dict):
            encoded.append(parse_object(prompt, param))
            continue
        token_ids = parse_mixed(prompt, param, vocab_size, encode)
        encoded.append(Prompt(param, None, token_ids))
    return encoded


def infill_files(body: LlamaInfillRequest) -> list[tuple[str, str]]:
    """Return the name and the text of each other file.

    Raises:
        APIError: An entry has no text, or a name that is not a string (400).
    """
    files = []
    for i, entry in enumerate(body.input_extra or ()):
        place = f"input_extra[{i}]"
        text = expect_text(entry, "text", place)
        name = expect(entry.get("filename", "file"), str, f"{place}.filename", "a string")
        files.append((name, text))
    return files


def _prompts(body: LlamaFields) -> tuple[list[str | list[Part] | Json], bool]:
    if isinstance(body, LlamaInfillRequest):
        for name in ("input_prefix", "input_suffix"):
            if getattr(body, name) is None:
                raise bad_request(name, "is required")
        return [], False
    assert isinstance(body, LlamaCompletionRequest)
    prompt = body.prompt
    if prompt is None:
        raise bad_request("prompt", "is required")
    if not isinstance(prompt, list):
        return [_prompt(prompt, "prompt")], False
    if not prompt:
        raise bad_request("prompt", "must not be an empty array")
    if any(isinstance(part, int) for part in prompt):
        return [_prompt(prompt, "prompt")], False
    verify_num_sequences(len(prompt))
    return [_prompt(each, f"prompt[{i}]") for i, each in enumerate(prompt)], True


def _prompt(prompt: Any, where: str) -> str | list[Part] | Json:
    """Return one prompt. Raise APIError 400 if it is no text, list of token ids and texts, or object."""
    if isinstance(prompt, dict):
        return prompt
    if isinstance(prompt, list):
        for i, part in enumerate(prompt):
            if not isinstance(part, str | int):
                raise wrong(f"{where}[{i}]", "a token id or a string", part)
        return prompt
    return str(expect(prompt, str, where, "a string or an array of token ids and strings"))


def _logit_bias(value: Any, tokenizer: Tokenizer) -> dict[str, float] | None:
    """Return the biases by token id. The bias of a text applies to each of its tokens."""
    biases: dict[str, float] = {}
    for i, entry in enumerate(value.items() if isinstance(value, dict) else value or ()):
        place = f"logit_bias[{i}]"
        if len(entry) != 2 or not isinstance(entry[0], str | int):
            raise wrong(place, "a pair of a token and a bias", entry)
        token, bias = entry
        if bias is False:
            bias = -MAX_BIAS
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise wrong(f"{place}[1]", "a number or false", bias)
        number = parse_number(token) if isinstance(token, str) else token
        for token_id in list(tokenizer.encode(token, False)) if number is None else [number]:
            biases[str(token_id)] = min(max(bias, -MAX_BIAS), MAX_BIAS)
    return biases or None
