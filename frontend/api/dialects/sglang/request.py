"""Translate requests of SGLang's own API to completion requests.

The API is described at https://docs.sglang.ai/basic_usage/sampling_params.html.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ....http.errors import bad_request, wrong
from ...logprobs import Json
from ...schema import UNLIMITED, CompletionRequest
from ...schema.refused import verify_supported
from ...schema.sglang import PlainSampling, SglangGenerateRequest, SglangSampling

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

_REFUSED_PARAMS: Final = ("custom_params", "beam_width", "watermark")


class SglangPrompt(CompletionRequest, kw_only=True):
    """A completion request from SGLang's API.

    `prompts_param` is the field with the prompts. If `is_list`, the answer is a list. If `only_computes_prompt`, the
    answer has no text. The log-probabilities of the prompt begin at token `first_logprob`. `request_ids` has one id for
    each prompt.
    """

    prompts_param: str = "text"
    is_list: bool = False
    only_computes_prompt: bool = False
    first_logprob: int = 0
    return_text_in_logprobs: bool = False
    request_ids: list[str] = msgspec.field(default_factory=list)

    def sent_name(self, name: str) -> str:
        """Return the name of a field in SGLang's API."""
        if name in ("logprobs", "prompt_logprobs"):
            return "top_logprobs_num"
        if name in ("logprob_token_ids", "prompt_logprob_token_ids"):
            return "token_ids_logprob"
        if name in _PLAIN or name in _NAMES:
            return f"sampling_params.{_NAMES.get(name, name)}"
        return super().sent_name(name)


def translate(body: SglangGenerateRequest) -> SglangPrompt:
    """Return the body translated to a completion request.

    Raises:
        APIError: A field is invalid or not supported (400).
    """
    params = body.sampling_params or SglangSampling()
    verify_supported(params, _REFUSED_PARAMS, "sampling_params.")
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("text", "is required, or input_ids instead of it")
    param = "text" if body.input_ids is None else "input_ids"
    prompt: Any = body.text if body.input_ids is None else body.input_ids
    is_list = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    max_tokens = DEFAULT_MAX_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    if max_tokens == UNLIMITED:
        raise wrong("sampling_params.max_new_tokens", "at least 0", max_tokens)
    tag = params.structural_tag
    ids = body.rid if isinstance(body.rid, list) else []
    return SglangPrompt(
        **{name: getattr(params, name) for name in _PLAIN},
        **_logprobs(body, max_tokens),
        model=body.lora_path or None,
        prompt=prompt,
        stream=body.stream,
        max_tokens=max_tokens or 1,
        min_tokens=params.min_new_tokens,
        seed=params.sampling_seed,
        include_stop_str_in_output=params.no_stop_trim,
        structured_outputs={"structural_tag": tag} if tag else None,
        priority=body.priority,
        cache_salt=body.cache_salt or body.extra_key or None,
        data_parallel_rank=body.data_parallel_rank,
        routed_dp_rank=body.routed_dp_rank,
        return_token_ids=body.return_prompt_token_ids,
        rid=body.rid if not ids else ids[0] if len(ids) == 1 else None,
        user=body.user,
        prompts_param=param,
        is_list=is_list,
        only_computes_prompt=max_tokens == 0,
        return_text_in_logprobs=bool(body.return_text_in_logprobs),
        request_ids=ids,
    )


def _logprobs(body: SglangGenerateRequest, max_tokens: int) -> Json:
    """Return the fields for log-probabilities."""
    if not body.return_logprob:
        return {}
    count, listed = body.top_logprobs_num or 0, _listed_tokens(body)
    if count < 0:
        raise wrong("top_logprobs_num", "at least 0", count)
    total = max_tokens * (1 + count + len(listed))
    if body.stream and total > MAX_REPEATED_LOGPROBS:
        raise bad_request(
            "return_logprob",
            f"needs {total} log-probabilities for max_new_tokens={max_tokens}, but in a stream at most "
            f"{MAX_REPEATED_LOGPROBS} are allowed; use stream=false or request fewer",
        )
    fields: Json = {"logprobs": count, "logprob_token_ids": listed}
    first = -1 if body.logprob_start_len is None else body.logprob_start_len
    if first >= 0:
        if body.stream:
            raise bad_request("logprob_start_len", "cannot be used in a stream")
        fields |= {"prompt_logprobs": count, "first_logprob": first}
    return fields


def _listed_tokens(body: SglangGenerateRequest) -> list[int]:
    """Return the token ids of `token_ids_logprob`."""
    listed: list[Any] = body.token_ids_logprob or []
    if not any(isinstance(each, list) for each in listed):
        return listed
    if any(each != listed[0] for each in listed):
        raise bad_request("token_ids_logprob", "must have the same list for each prompt")
    first: list[int] = listed[0]
    return first


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
