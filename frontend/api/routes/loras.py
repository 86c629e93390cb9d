"""Routes for operators that load and unload LoRA adapters: `/v1/load_lora_adapter` and others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import CheckpointError, ConfigError
from ....protocol.file_identity import LoraAdapter
from ....protocol.sampling_params import SamplingParams
from ...client.engine_client import ReplicaUnavailable, SequenceRequest
from ...http.errors import (
    APIError,
    bad_request,
    echo,
    json_response,
    renamer,
    renaming,
    unavailable,
)
from ...model_source.lora import find_adapter
from ...supervisor.console import Console
from ..bodies.intake import RouteHandlers
from ..generation import raise_if_failed, translate_refusals
from ..openapi import accepts
from ..schema.vllm import LoadLoraRequest, SagemakerLoadRequest, UnloadLoraRequest

MAX_PATH: Final = 4096
"""Maximum characters of a path, as in Linux."""

LOAD_S: Final = 300.0
"""Maximum seconds for all replicas to load an adapter."""

_Body = TypeVar("_Body", bound=msgspec.Struct)

_sagemaker_name = renamer({"lora_name": "name", "lora_path": "src"})


class Loras(RouteHandlers):
    """Routes that add and remove adapters while the server runs."""

    def verify_allowed(self) -> None:
        """Verify that the operator allows changes of the adapters.

        Raises:
            APIError: The server was started without the flag (404).
        """
        if not self._serving.config.frontend.allow_runtime_lora_updating:
            raise APIError(
                404,
                "This server was started without --allow-runtime-lora-updating; restart it with that flag",
            )

    @accepts(LoadLoraRequest)
    async def load(self, http: Request) -> Response:
        """Load an adapter on every replica that is up, then serve it."""
        request = await self._read(http, LoadLoraRequest)
        return await self._add(http, request)

    @accepts(SagemakerLoadRequest)
    async def load_for_sagemaker(self, http: Request) -> Response:
        """Load an adapter whose fields have SageMaker's names."""
        request = await self._read(http, SagemakerLoadRequest)
        with renaming(_sagemaker_name):
            load = LoadLoraRequest(lora_name=request.name, lora_path=request.src)
            return await self._add(http, load)

    @accepts(UnloadLoraRequest)
    async def unload(self, http: Request) -> Response:
        """Remove an adapter. Its running requests are not affected."""
        request = await self._read(http, UnloadLoraRequest)
        if not request.lora_name:
            raise bad_request("lora_name", "is required")
        return await self._remove(request.lora_name)

    async def unload_for_sagemaker(self, http: Request) -> Response:
        """Remove the adapter that the path names."""
        self.verify_allowed()
        return await self._remove(http.path_params["name"])

    async def _read(self, http: Request, schema: type[_Body]) -> _Body:
        self.verify_allowed()
        with self._intake.lease() as lease:
            request, _ = await self._intake.receive(http, schema, lease)
        return request

    async def _add(self, http: Request, request: LoadLoraRequest) -> Response:
        name, path = request.lora_name, request.lora_path
        if not name or not path:
            raise bad_request("lora_name" if path else "lora_path", "is required")
        if len(path) > MAX_PATH:
            raise bad_request(
                "lora_path", f"must have at most {MAX_PATH} characters, got {len(path)}"
            )
        serving = self._serving
        serving.verify_serving()
        replaces = bool(request.load_inplace)
        if name in serving.config.model.served_names:
            raise bad_request(
                "lora_name", f"{echo(name)} is the name of the model; choose another one"
            )
        if not replaces and serving.loras.find(name) is not None:
            raise bad_request(
                "lora_name",
                f"{echo(name)} has already been loaded; unload it first, or send load_inplace=true",
            )
        adapter = await self._find(name, path)
        await self._load_everywhere(adapter, http.scope["state"]["request_id"])
        await asyncio.to_thread(serving.loras.add, adapter, replaces=replaces)
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def _remove(self, name: str) -> Response:
        if not await asyncio.to_thread(self._serving.loras.remove, name):
            raise APIError(404, f"The LoRA adapter {echo(name)} does not exist", param="lora_name")
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    @accepts(LoadLoraRequest)
    async def load_like_sglang(self, http: Request) -> Response:
        """Load an adapter, and list all adapters."""
        return await self._list_after(self.load, http)

    @accepts(UnloadLoraRequest)
    async def unload_like_sglang(self, http: Request) -> Response:
        """Remove an adapter, and list the others."""
        return await self._list_after(self.unload, http)

    async def _list_after(
        self, change: Callable[[Request], Awaitable[Response]], http: Request
    ) -> Response:
        self.verify_allowed()
        status, answer = 200, {"success": True, "error_message": None}
        try:
            await change(http)
        except APIError as error:
            # SGLang's answer to a request that cannot be fulfilled.
            if error.status not in (400, 404):
                raise
            status = 400
            answer = error.body | {"success": False, "error_message": error.message}
        paths = {adapter.name: adapter.path for adapter in self._serving.loras}
        return json_response(answer | {"loaded_adapters": paths}, status)

    async def _find(self, name: str, path: str) -> LoraAdapter:
        model = self._serving.config.model
        try:
            return await asyncio.to_thread(
                find_adapter, name, path, model.download_dir, Console(), "lora_path"
            )
        except ConfigError as error:
            raise APIError(404, str(error), param="lora_path") from None
        except CheckpointError as error:
            raise APIError(400, str(error), param="lora_path") from None

    async def _load_everywhere(self, adapter: LoraAdapter, request_id: str) -> None:
        """Load the adapter on every replica, by a request for one token."""
        ranks = range(self._serving.num_replicas)
        loads = (self._load_on(rank, adapter, request_id) for rank in ranks)
        if not any(await asyncio.gather(*loads)):
            raise unavailable(
                "No replica is up, so the adapter was not loaded; retry later",
                self._serving.retry_after_s,
            )

    async def _load_on(self, rank: int, adapter: LoraAdapter, request_id: str) -> bool:
        """Load the adapter on a replica. Return False if the replica is not up."""
        model = self._serving.config.model
        request = SequenceRequest(
            np.zeros(1, np.int32),
            SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False),
            deadline=time.monotonic() + LOAD_S,
            data_parallel_rank=rank,
            pooling=None if model.generates else model.pooling_params,
            lora=adapter,
        )
        with translate_refusals(self._serving):
            try:
                group = await self._serving.engine.submit([request], request_id=request_id)
            except ReplicaUnavailable:
                return False
        try:
            [output] = await group.result()
        finally:
            group.abort()
        try:
            raise_if_failed(output)
        except APIError as error:
            if error.status == 400:
                raise APIError(400, f"lora_path: {error.message}", param="lora_path") from None
            raise
        return True
