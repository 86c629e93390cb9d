"""llama.cpp's routes for operators: scales of adapters, actions of slots, and the models of a router."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import EngineError
from ...http.errors import (
    APIError,
    bad_request,
    echo,
    json_response,
    redact,
    renaming,
    unavailable,
    wrong,
)
from ...model_source.lora_registry import LoraScale
from ..bodies.intake import Intake, RouteHandlers, reads
from ..numbers import parse_number
from ..routes.management import Management
from ..schema.llama_cpp import LlamaControlRequest, LlamaModelRequest
from ..serving import Serving

MAX_SCALES_BYTES: Final = 1 << 19
"""Maximum bytes of a list of scales."""

_MAX_ID_CHARACTERS: Final = 256
"""Number of characters above which no answer has such an ID, so that other API servers are not asked for it."""

_NO_ANSWER: Final = "no running answer with this ID was requested with reasoning_control=true"

_decode_scales = msgspec.json.Decoder(list[LoraScale]).decode

_WITHOUT_MECHANISM: Final = {
    "save": "All slots share one cache, so a slot has no state to save; --kv-disk keeps the blocks of all",
    "restore": "All slots share one cache, and its blocks are found by the prompt; --kv-disk keeps them",
    "unload": "This server has one model, which it serves until the server ends",
}


def _not_supported(what: str) -> APIError:
    """Return the error for an action that Engine has no mechanism for, as llama.cpp reports one."""
    return APIError(501, _WITHOUT_MECHANISM[what], type="not_supported_error")


class LlamaOperations(RouteHandlers):
    """The routes that change the server."""

    def __init__(
        self, serving: Serving, intake: Intake, management: Management, num_slots: int
    ) -> None:
        super().__init__(serving, intake)
        self._management = management
        self._num_slots = num_slots

    async def adapters(self, http: Request) -> Response:
        """List the adapters, with their scales for requests for the base model."""
        return json_response(
            [
                {
                    "id": i,
                    "name": adapter.name,
                    "path": adapter.path,
                    "scale": scale,
                    "task_name": "",
                    "prompt_prefix": "",
                }
                for i, (adapter, scale) in enumerate(self._serving.loras.scales)
            ]
        )

    async def set_scales(self, http: Request) -> Response:
        """Apply an adapter to all later requests for the base model. The body is an array of ids and scales."""
        body = await self._intake.receive_bytes(http)
        if len(body) > MAX_SCALES_BYTES:
            raise APIError(
                413, f"The body has {len(body)} bytes, but at most {MAX_SCALES_BYTES} are allowed"
            )
        try:
            scales = _decode_scales(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise APIError(
                400, f"The body must be an array of objects with id and scale: {error}"
            ) from None
        with renaming(str):
            await asyncio.to_thread(self._serving.loras.set_scales, scales, "scales")
        return json_response({"success": True})

    async def act_on_slot(self, http: Request) -> Response:
        """Erase the cache, which is that of all slots."""
        text, action = http.path_params["id"], http.query_params.get("action", "")
        slot = parse_number(text)
        if slot is None or slot >= self._num_slots:
            raise bad_request(
                "id", f"must be below the number of slots, {self._num_slots}, got {echo(text)}"
            )
        if action in ("save", "restore"):
            raise _not_supported(action)
        if action != "erase":
            raise bad_request("action", f"must be save, restore or erase, got {echo(action)}")
        await self._management.reset_prefix_cache(http)
        return json_response({"id_slot": slot})

    @reads(LlamaModelRequest)
    async def load(self, http: Request, body: LlamaModelRequest, size: int) -> Response:
        """Report success for a served model. Other models cannot be loaded into a running server."""
        if not body.model:
            raise bad_request("model", "is required")
        self._serving.verify_model(body.model)
        return json_response({"success": True})

    async def unload(self, http: Request) -> Response:
        """Refuse, because the server has only this model."""
        raise _not_supported("unload")

    @reads(LlamaControlRequest)
    async def control(self, http: Request, body: LlamaControlRequest, size: int) -> Response:
        """End the reasoning of a running answer."""
        self._serving.verify_model(body.model)
        if body.action not in (None, "reasoning_end"):
            raise wrong("action", '"reasoning_end"', body.action)
        if not body.id:
            raise bad_request("id", "is required: the ID of a running answer")
        is_ended, problem = await self._end_reasoning(http.state.owner, body.id)
        if is_ended:
            return json_response({"success": True})
        return json_response({"success": False, "message": problem or _NO_ANSWER})

    async def _end_reasoning(self, owner: str, answer_id: str) -> tuple[bool, str]:
        """End the reasoning of an answer, which another API server may hold.

        Raises:
            APIError: The other API servers cannot be reached, because no replica is up (503).
        """
        engine = self._serving.engine
        is_ended, problem = engine.reasoning_ends.end(owner, answer_id)
        num_servers = self._serving.config.parallel.api_server_count
        if is_ended or problem or num_servers == 1 or len(answer_id) > _MAX_ID_CHARACTERS:
            return is_ended, problem
        try:
            return await engine.calls.end_reasoning(owner, answer_id)
        except EngineError as error:
            message = f"The other API servers did not answer: {redact(str(error))}"
            raise unavailable(message, self._serving.retry_after_s) from error
