"""Parse `kv_transfer_params`, with which routers connect an engine that prefills to one that decodes."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from ....protocol.config import EngineConfig
from ....protocol.kv_transfer.direct import MAX_TP_SIZE
from ...http.errors import APIError, bad_request, echo

FIELD: Final = "kv_transfer_params"

_MAX_CHARS: Final = 256
_FLAGS: Final = ("do_remote_prefill", "do_remote_decode")


class _TransferParams(msgspec.Struct, omit_defaults=True):
    """The fields that vLLM's routers send. Other fields are ignored."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | str | None = None
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_TP_SIZE)] | None = None


def transfer_params(value: Any, config: EngineConfig) -> dict[str, object] | None:
    """Return the verified KV-transfer parameters of a request.

    Without a KV connector they have no effect, as in vLLM: the server computes the prompt itself.

    Raises:
        APIError: A field is invalid (400).
    """
    if value is None or config.kv_transfer is None:
        return None
    try:
        params = msgspec.convert(value, _TransferParams)
    except msgspec.ValidationError as error:
        raise APIError(400, f"{FIELD}: {error}, got {echo(value)}", param=FIELD) from None
    fields: dict[str, object] = msgspec.to_builtins(params)
    for name, each in fields.items():
        if isinstance(each, str) and len(each) > _MAX_CHARS:
            raise APIError(
                400,
                f"{FIELD}.{name} must have at most {_MAX_CHARS} characters, got {len(each)}",
                param=FIELD,
            )
    if all(fields.get(name) for name in _FLAGS):
        raise bad_request(FIELD, f"must not have both {' and '.join(_FLAGS)}")
    return fields or None
