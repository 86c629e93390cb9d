"""Translate requests of Text Generation Inference to completion requests.

The API is described at https://huggingface.co/docs/text-generation-inference.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ....http.errors import APIError, bad_request, expect, wrong
from ...logprobs import Json
from ...schema import UNLIMITED, CompletionRequest
from ...schema.dialects.tgi import TgiParameters, TgiRequest

_COPIED: Final = (
    "best_of",
    "repetition_penalty",
    "frequency_penalty",
    "top_k",
    "top_p",
    "typical_p",
    "stop",
    "seed",
)
"""Parameters that completion requests have too, with the same meaning."""

_NAMES: Final = {
    "max_tokens": "max_new_tokens",
    "truncate_prompt_tokens": "truncate",
    "logprobs": "top_n_tokens",
    "structured_outputs": "grammar",
    "model": "adapter_id",
    "n": "best_of",
}
"""Field of a completion request -> the parameter that sets it."""

_POSITIVE: Final = ("best_of", "temperature", "repetition_penalty", "top_k", "top_p", "typical_p")


class TgiPrompt(CompletionRequest, kw_only=True):
    """A completion request from TGI's API.

    If `is_list`, the answer is a list. With `shows_details`, it has the tokens, and with `shows_prompt_tokens` those of
    the prompt. `shows_prompt` puts the text of the prompt before the answer.
    """

    is_list: bool = False
    shows_details: bool = False
    shows_prompt_tokens: bool = False
    shows_prompt: bool = False

    def sent_name(self, name: str) -> str:
        """Return the name of a field in TGI's API."""
        if name == "prompt":
            return "inputs"
        name = _NAMES.get(name, name)
        return f"parameters.{name}" if name in TgiParameters.__struct_fields__ else name


def translate(body: TgiRequest, *, stream: bool, is_compatible: bool) -> TgiPrompt:
    """Return the body translated to a completion request.

    Args:
        body: The body of the request.
        stream: True to stream the answer.
        is_compatible: True for `POST /`, which shows the prompt by default and answers with a list.

    Raises:
        APIError: A parameter is invalid (400).
    """
    # TGI samples if the parameters are left out, but not if they are empty.
    params = body.parameters or TgiParameters(do_sample=True)
    if not body.inputs:
        raise bad_request("inputs", "is required and must not be empty")
    _verify(params, stream=stream)
    top = params.top_n_tokens or 0
    shows_details = bool(params.details or params.decoder_input_details)
    shows_prompt = params.return_full_text
    return TgiPrompt(
        **{name: getattr(params, name) for name in _COPIED},
        prompt=body.inputs,
        model=params.adapter_id or None,
        stream=stream,
        temperature=(params.temperature or 1.0) if _samples(params) else 0.0,
        max_tokens=UNLIMITED if params.max_new_tokens is None else params.max_new_tokens,
        include_stop_str_in_output=True,
        truncate_prompt_tokens=params.truncate,
        logprobs=top if shows_details or stream else None,
        prompt_logprobs=0 if params.decoder_input_details else None,
        structured_outputs=_constraint(params.grammar),
        is_list=is_compatible,
        shows_details=shows_details,
        shows_prompt_tokens=bool(params.decoder_input_details),
        shows_prompt=is_compatible if shows_prompt is None else shows_prompt,
    )


def _verify(params: TgiParameters, *, stream: bool) -> None:
    for name in _POSITIVE:
        value = getattr(params, name)
        if value is not None and value <= 0:
            raise wrong(f"parameters.{name}", "more than 0", value)
    if params.max_new_tokens is not None and params.max_new_tokens < 1:
        raise wrong("parameters.max_new_tokens", "at least 1", params.max_new_tokens)
    if params.top_n_tokens is not None and params.top_n_tokens < 0:
        raise wrong("parameters.top_n_tokens", "at least 0", params.top_n_tokens)
    if params.watermark:
        raise bad_request("parameters.watermark", "is not served; leave it out, got true")
    if (params.best_of or 1) > 1:
        if params.seed is not None:
            raise bad_request("parameters.seed", "must not be set with best_of > 1")
        if not _samples(params):
            raise bad_request("parameters.best_of", "> 1 needs do_sample=true or a temperature")
        if stream:
            raise bad_request("parameters.best_of", "must be 1 in a stream")
    if params.decoder_input_details and stream:
        raise bad_request("parameters.decoder_input_details", "cannot be streamed")


def _samples(params: TgiParameters) -> bool:
    """Return True if tokens are sampled, False if the most probable ones are chosen."""
    chosen = (params.top_k, params.top_p, params.typical_p, params.temperature)
    return bool(params.do_sample) or any(value is not None for value in chosen)


def _constraint(grammar: Json | None) -> Json | None:
    """Return the constraint in a `grammar` as `structured_outputs`."""
    if grammar is None:
        return None
    kind, value = grammar.get("type"), grammar.get("value")
    where = "parameters.grammar.value"
    if kind == "regex":
        return {"regex": expect(value, str, where, "a regular expression")}
    if kind == "json_schema":
        given = expect(value, dict, where, "an object with a schema")
        value, where = given.get("schema"), f"{where}.schema"
    elif kind not in ("json", "json_object"):
        raise wrong("parameters.grammar.type", '"json", "json_schema" or "regex"', kind)
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise wrong(where, "a JSON schema", value) from None
    schema = expect(value, dict, where, "a JSON schema")
    if "properties" in schema and "type" not in schema:
        # In TGI, such a schema describes an object.
        schema = schema | {"type": "object"}
    return {"json": schema}


class TgiError(APIError):
    """An error in TGI's format."""

    def __init__(self, error: APIError) -> None:
        is_validation = error.status in (400, 404)
        status = 422 if is_validation else error.status
        super().__init__(status, error.message, param=error.param, headers=error.headers)
        self.error_type = "validation" if is_validation else "generation"
        if error.status in (429, 503):
            self.error_type = "overloaded"

    @property
    def body(self) -> Json:
        """The JSON body of the response."""
        prefix = "Input validation error: " if self.error_type == "validation" else ""
        return {"error": prefix + self.message, "error_type": self.error_type}
