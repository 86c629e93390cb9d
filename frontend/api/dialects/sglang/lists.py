"""Parameters of SGLang's requests that have a value for each prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ....http.errors import bad_request, wrong
from ...logprobs import Json
from ...prompts import verify_num_sequences
from ...schema.sglang import SglangGenerateRequest
from .media import MEDIA_FIELDS

_NAMES: Final = (
    "sampling_params",
    "return_logprob",
    "return_hidden_states",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "lora_path",
    "extra_key",
    "cache_salt",
    "use_audio_in_video",
    "max_dynamic_patch",
    "min_dynamic_patch",
    "image_max_dynamic_patch",
    "video_max_dynamic_patch",
)


def split(
    body: SglangGenerateRequest, param: str, prompts: Any, *, is_list: bool
) -> Iterator[tuple[SglangGenerateRequest, str]]:
    """Yield bodies with one value for each parameter, and the index such as `[1]` that follows their names in errors.

    It is one body with all prompts, and the index "", if each parameter has one value.

    Args:
        body: The body of the request.
        param: The name of the field with the prompts.
        prompts: The value of this field.
        is_list: True if it is a list of prompts.

    Raises:
        APIError: A parameter has too few or too many values, or prompts differ in type (400).
    """
    lists: Json = {}
    count = len(prompts) if is_list else 1
    verify_num_sequences(count, param)
    if not count:
        raise bad_request(param, "must not be an empty array")
    for i, prompt in enumerate(prompts if is_list else ()):
        if type(prompt) is not type(prompts[0]):
            raise wrong(f"{param}[{i}]", "a prompt of the same type as the first", prompt)
    # The media of a single prompt may be a list.
    for name in (*_NAMES, *(MEDIA_FIELDS if is_list else ())):
        values = getattr(body, name)
        if not _is_list(name, values) or (name in MEDIA_FIELDS and not values):
            continue
        if len(values) != count:
            raise bad_request(
                name, f"must have one value for each of the {count} prompts, got {len(values)}"
            )
        if name == "token_ids_logprob" and any(not isinstance(each, list) for each in values):
            raise bad_request(name, "must have a list of token ids for each prompt")
        lists[name] = values
    same = {name: values[0] for name, values in lists.items() if values.count(values[0]) == count}
    whole = msgspec.structs.replace(body, **same)
    if not (differing := lists.keys() - same.keys()):
        yield whole, ""
        return
    for i in range(count):
        one = {name: lists[name][i] for name in differing} | {param: prompts[i]}
        yield msgspec.structs.replace(whole, **one), f"[{i}]"


def _is_list(name: str, values: Any) -> bool:
    if not isinstance(values, list):
        return False
    # A list of token ids is one value.
    return name != "token_ids_logprob" or any(isinstance(each, list) for each in values)
