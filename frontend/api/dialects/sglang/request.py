"""Translate requests of SGLang's own API to completion requests.

The API is described at https://docs.sglang.ai/basic_usage/sampling_params.html.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from ....http.errors import bad_request, wrong
from ...logprobs import Json
from ...schema import UNLIMITED, CompletionRequest
from ...schema.refused import verify_supported
from ...schema.sglang import PlainSampling, SglangGenerateRequest, SglangSampling
from .lists import split
from .media import given_media

DEFAULT_MAX_TOKENS: Final = 128

MAX_REPEATED_LOGPROBS: Final = 1 << 15
"""Maximum log-probabilities of a streamed answer, because every event repeats those of the earlier events."""

_PLAIN: Final = PlainSampling.__struct_fields__

_NAMES: Final = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    "structured_outputs": "structural_tag",
}
"""Field of a completion request -> the sampling parameter of SGLang that sets it."""

_LOGPROBS: Final = {
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
    "prompt_logprob_token_ids": "token_ids_logprob",
}

_REFUSED_PARAMS: Final = ("custom_params", "beam_width", "watermark")


class SglangPrompt(CompletionRequest, kw_only=True):
    """A completion request from SGLang's API.

    `prompts_param` is the field with the prompts. If `is_list`, the answer is a list. If `only_computes_prompt`, the
    answer has no text. The log-probabilities of the prompt, with `num_prompt_tops` others at each position, begin at
    token `first_logprob`; there are none if it is negative. `request_ids` has one id for each prompt. If prompts have
    parameters of their own, `parts` has the request for each prompt, and `place` is the end of the parameters' names.
    If `requires_reasoning`, the tokens of the reasoning are counted. `embeds` replace the tokens. Each prompt has the
    `media`. `turn` is the place within a session; None outside of sessions.
    """

    prompts_param: str = "text"
    is_list: bool = False
    only_computes_prompt: bool = False
    num_prompt_tops: int = 0
    first_logprob: int = -1
    return_text_in_logprobs: bool = False
    request_ids: list[str] = msgspec.field(default_factory=list)
    parts: list[SglangPrompt] = msgspec.field(default_factory=list)
    place: str = ""
    requires_reasoning: bool = False
    embeds: Any = None
    embeds_shape: list[int] | None = None
    media: Any = None
    turn: Any = None

    def sent_name(self, name: str) -> str:
        """Return the name of a field in SGLang's API."""
        if name in _LOGPROBS:
            return _LOGPROBS[name]
        if name in _PLAIN or name in _NAMES:
            return f"sampling_params{self.place}.{_NAMES.get(name, name)}"
        return super().sent_name(name)


def translate(body: SglangGenerateRequest) -> SglangPrompt:
    """Return the body translated to a completion request. Raise APIError 400 if a field is invalid or not supported."""
    param, prompt = _find_prompt(body)
    is_list = _is_list(param, prompt)
    parts = [
        _translate(each, param, place)
        for each, place in split(body, param, prompt, is_list=is_list)
    ]
    first = parts[0]
    for part in parts:
        if part.num_outputs != first.num_outputs:
            raise wrong(
                f"sampling_params{part.place}.n", f"{first.num_outputs} as before", part.num_outputs
            )
    ids = body.rid if isinstance(body.rid, list) else []
    whole: Json = {
        "prompt": prompt if body.input_ids is not None or body.text is not None else None,
        "embeds": prompt if param.startswith("input_embeds") else None,
        "is_list": is_list,
        "rid": body.rid if not ids else ids[0] if len(ids) == 1 else None,
        "request_ids": ids,
    }
    if len(parts) > 1:
        whole |= {"parts": parts, "model": None, "cache_salt": None}
    return msgspec.structs.replace(first, **whole)


def _find_prompt(body: SglangGenerateRequest) -> tuple[str, Any]:
    """Return the name and the value of the field with the prompts."""
    names = ("text", "input_ids", "input_embeds", "input_embeds_bytes")
    given = [name for name in names if getattr(body, name) is not None]
    if not given:
        raise bad_request("text", "is required, or input_ids or input_embeds instead of it")
    if len(given) > 1:
        raise bad_request(given[1], f"cannot be combined with {given[0]}")
    return given[0], getattr(body, given[0])


def _is_list(param: str, prompt: Any) -> bool:
    """Return whether there is a list of prompts."""
    if not isinstance(prompt, list):
        return False
    if param != "input_embeds":
        return not (prompt and isinstance(prompt[0], int))
    return bool(prompt and prompt[0] and isinstance(prompt[0][0], list))


def _translate(body: SglangGenerateRequest, param: str, place: str) -> SglangPrompt:
    """Return the request for the prompts of a body with one value of each parameter."""
    params = body.sampling_params or SglangSampling()
    assert isinstance(params, SglangSampling)
    where = f"sampling_params{place}."
    verify_supported(params, _REFUSED_PARAMS, where)
    max_tokens = DEFAULT_MAX_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    if max_tokens == UNLIMITED:
        raise wrong(f"{where}max_new_tokens", "at least 0", max_tokens)
    tag = params.structural_tag
    media = given_media(body, place)
    if media is not None and param.startswith("input_embeds"):
        raise bad_request(media.param, f"cannot be combined with {param}")
    prompt: Any = body.text if body.input_ids is None else body.input_ids
    fields: Json = {name: getattr(params, name) for name in _PLAIN}
    fields |= _logprobs(body, max_tokens)
    fields |= {
        "model": body.lora_path or None,
        "cache_salt": body.cache_salt or body.extra_key or None,
    }
    return SglangPrompt(
        **fields,
        prompt=prompt,
        stream=body.stream,
        max_tokens=max_tokens or 1,
        min_tokens=params.min_new_tokens,
        seed=params.sampling_seed,
        include_stop_str_in_output=params.no_stop_trim,
        structured_outputs={"structural_tag": tag} if tag else None,
        priority=body.priority,
        data_parallel_rank=body.data_parallel_rank,
        routed_dp_rank=body.routed_dp_rank,
        return_token_ids=body.return_prompt_token_ids,
        return_hidden_states=cast("bool | str | None", body.return_hidden_states),
        user=body.user,
        prompts_param=param + place,
        only_computes_prompt=max_tokens == 0,
        return_text_in_logprobs=bool(body.return_text_in_logprobs),
        place=place,
        requires_reasoning=bool(body.require_reasoning),
        embeds=body.input_embeds or body.input_embeds_bytes,
        embeds_shape=body.input_embeds_shape,
        media=media,
    )


def _logprobs(body: SglangGenerateRequest, max_tokens: int) -> Json:
    """Return the fields for log-probabilities."""
    if not body.return_logprob:
        return {}
    count: Any = body.top_logprobs_num or 0
    if count < 0:
        raise wrong("top_logprobs_num", "at least 0", count)
    first: Any = -1 if body.logprob_start_len is None else body.logprob_start_len
    fields: Json = {"logprobs": count, "logprob_token_ids": body.token_ids_logprob or []}
    return fields | {"num_prompt_tops": count, "first_logprob": first}


def verify_repeated(request: SglangPrompt, num_tokens: int) -> None:
    """Verify that a stream repeats few enough log-probabilities.

    Args:
        request: The request for one prompt, or for prompts with the same parameters.
        num_tokens: The number of tokens of the prompts that have log-probabilities.

    Raises:
        APIError: They are more than `MAX_REPEATED_LOGPROBS` (400).
    """
    if not request.stream or request.logprobs is None:
        return
    total = num_tokens + (request.max_tokens or 1)
    total *= 1 + request.logprobs + len(request.logprob_token_ids or ())
    if total > MAX_REPEATED_LOGPROBS:
        raise bad_request(
            "return_logprob",
            f"needs {total} log-probabilities for max_new_tokens={request.max_tokens} and {num_tokens} tokens of the "
            f"prompt, but in a stream at most {MAX_REPEATED_LOGPROBS} are allowed; use stream=false or request fewer",
        )


def assign_ids(request: SglangPrompt, count: int) -> None:
    """Give each of `count` answers its id, if the request has any. A single id gets a number for each of several.

    Raises:
        APIError: The request has a list of ids, but not one for each answer (400).
    """
    ids = request.request_ids
    if ids and len(ids) != count:
        raise bad_request("rid", f"must have one id for each of {count} answers, got {len(ids)}")
    if not ids and isinstance(request.rid, str):
        numbered = [f"{request.rid}_{number}" for number in range(count)]
        request.request_ids = numbered if request.is_list else [request.rid]
