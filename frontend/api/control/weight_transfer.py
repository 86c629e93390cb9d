"""Routes with which a trainer sends new weights to the server, as vLLM and SGLang name them."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import EngineError
from ....protocol.weights.transfer import (
    FinishUpdate,
    JoinGroup,
    LeaveGroup,
    ReadTensor,
    ReceiveTensors,
    StartUpdate,
    TransferCommand,
    TransferError,
    TransferReply,
)
from ...client.replicas.weight_receiver import WeightReceiver
from ...http.errors import APIError, bad_request, json_response, redact, wrong
from ...http.routing import Route
from ..bodies.intake import Intake, RouteHandlers, reads
from ..schema.dialects.weight_transfer import (
    GroupFields,
    SglangGroupRequest,
    SglangTensorRequest,
    SglangTensorsRequest,
    VllmFinishRequest,
    VllmInitRequest,
    VllmTensorsRequest,
)
from ..serving import Serving
from .weights import Weights

FLAT: Final = "flattened_bucket"
"""SGLang's name of a broadcast with all tensors."""

NOT_ALLOWED: Final = (
    "Trainers may not send weights to this server; start it with "
    """--weight-transfer-config '{"backend": "gloo"}'"""
)


class WeightTransfer(RouteHandlers):
    """Routes of one mechanism: join, start, receive any number of times, finish.

    A process collects the tensors, and the finished checkpoint is loaded as `/update_weights_from_disk` does. Until
    then the old weights serve, whatever happens to the trainer.
    """

    def __init__(self, serving: Serving, intake: Intake, weights: Weights) -> None:
        super().__init__(serving, intake)
        self._weights = weights
        self._receiver = WeightReceiver(serving.config)

    def routes(self) -> list[Route]:
        """Return the routes of both servers."""
        post = {
            "/init_weight_transfer_engine": self.join_like_vllm,
            "/start_weight_update": self.start,
            "/update_weights": self.receive_like_vllm,
            "/finish_weight_update": self.finish_like_vllm,
            "/shutdown_weight_transfer_engine": self.leave,
            "/init_weights_update_group": self.join_like_sglang,
            "/begin_weight_update": self.start,
            "/update_weights_from_distributed": self.receive_like_sglang,
            "/end_weight_update": self.finish_like_sglang,
            "/destroy_weights_update_group": self.leave,
            "/get_weights_by_name": self.read_tensor,
        }
        return [
            Route("/get_world_size", self.world_size),
            *(Route(path, handler, methods=["POST"]) for path, handler in post.items()),
        ]

    async def world_size(self, request: Request) -> Response:
        """Return the number of workers."""
        parallel = self._serving.config.parallel
        is_of_one = request.query_params.get("include_dp", "true").lower() == "false"
        size = parallel.workers_per_core if is_of_one else parallel.num_workers
        return json_response({"world_size": size})

    @reads(VllmInitRequest)
    async def join_like_vllm(self, http: Request, body: VllmInitRequest, size: int) -> Response:
        """Join the group of a trainer."""
        info = body.init_info
        if info.nccl_unique_id_b64 is not None:
            raise bad_request("init_info.nccl_unique_id_b64", "needs NCCL; send master_address")
        chunk_bytes = info.packed_buffer_size_bytes if info.packed else 0
        await self._join(info, chunk_bytes=chunk_bytes)
        return json_response({"message": "Weight transfer initialized"})

    @reads(VllmTensorsRequest)
    async def receive_like_vllm(
        self, http: Request, body: VllmTensorsRequest, size: int
    ) -> Response:
        """Receive tensors from the trainer."""
        info = body.update_info
        await self._receive(info.names, info.dtype_names, info.shapes)
        return json_response({"message": "Weights updated"})

    async def finish_like_vllm(self, request: Request) -> Response:
        """Load the received tensors. The body may be missing."""
        if request.headers.get("content-length", "0") == "0":
            return await self._finish_named("")
        return await self._read_version(request)

    @reads(VllmFinishRequest)
    async def _read_version(self, http: Request, body: VllmFinishRequest, size: int) -> Response:
        return await self._finish_named(body.weight_version or "")

    async def _finish_named(self, version: str) -> Response:
        await self._finish(version)
        return json_response({"message": "Weight update finished"})

    async def start(self, request: Request) -> Response:
        """Begin an update."""
        await self._execute(StartUpdate())
        message = "Weight update started"
        return json_response({"success": True, "message": message})

    async def leave(self, request: Request) -> Response:
        """Leave the group of the trainer."""
        await self._execute(LeaveGroup())
        return json_response({"success": True, "message": "The group was left."})

    @reads(SglangGroupRequest)
    async def join_like_sglang(
        self, http: Request, body: SglangGroupRequest, size: int
    ) -> Response:
        """Join the group of a trainer."""
        if body.backend != "gloo":
            raise wrong("backend", '"gloo"', body.backend)
        # The prefixes that torch.distributed gives to a named group of this backend.
        name = body.group_name
        await self._join(body, prefixes=(name, f"{name}/", "cpu/"))
        return json_response({"success": True, "message": "The group is complete."})

    @reads(SglangTensorsRequest)
    async def receive_like_sglang(
        self, http: Request, body: SglangTensorsRequest, size: int
    ) -> Response:
        """Receive tensors from the trainer."""
        if body.load_format not in (None, FLAT):
            raise wrong("load_format", f'"{FLAT}" or null', body.load_format)
        is_flat, version = body.load_format == FLAT, body.weight_version or ""
        await self._receive(body.names, body.dtypes, body.shapes, is_flat=is_flat, version=version)
        return json_response({"success": True, "message": "The tensors were received."})

    async def finish_like_sglang(self, request: Request) -> Response:
        """Load the received tensors."""
        await self._finish("")
        return json_response({"success": True, "message": "The weights were updated."})

    @reads(SglangTensorRequest)
    async def read_tensor(self, http: Request, body: SglangTensorRequest, size: int) -> Response:
        """Return the first rows of a tensor of the current weights."""
        command = ReadTensor(body.name, body.truncate_size)
        return json_response((await self._execute(command, starts=True)).values)

    async def _join(
        self, group: GroupFields, *, prefixes: tuple[str, ...] = (), chunk_bytes: int = 0
    ) -> None:
        num_ranks = self._serving.config.parallel.num_workers
        if group.rank_offset + num_ranks > group.world_size:
            raise wrong(
                "world_size",
                f"at least {group.rank_offset + num_ranks} with {num_ranks} workers and rank_offset {group.rank_offset}",
                group.world_size,
            )
        command = JoinGroup(
            group.master_address,
            group.master_port,
            group.rank_offset,
            group.world_size,
            prefixes,
            chunk_bytes,
        )
        await self._execute(command, starts=True)

    async def _receive(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        *,
        is_flat: bool = False,
        version: str = "",
    ) -> None:
        dtypes = [dtype.removeprefix("torch.") for dtype in dtypes]
        await self._execute(ReceiveTensors(names, dtypes, shapes, is_flat, version))

    async def _finish(self, version: str) -> None:
        reply = await self._execute(FinishUpdate())
        try:
            await self._weights.load(reply.path, version or reply.version)
        except EngineError as error:
            raise _conflict(f"The weights were not loaded: {redact(str(error))}") from error

    async def _execute(self, command: TransferCommand, *, starts: bool = False) -> TransferReply:
        self._serving.verify_serving()
        if self._serving.config.frontend.weight_transfer_config is None:
            raise APIError(403, NOT_ALLOWED, type="permission_error")
        try:
            return await self._receiver.execute(command, starts=starts)
        except TransferError as error:
            if error.param:
                raise bad_request(error.param, f"is invalid: {error}") from None
            raise _conflict(str(error)) from None


def _conflict(message: str) -> APIError:
    return APIError(409, message, type="conflict_error")
