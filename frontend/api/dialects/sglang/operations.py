"""SGLang's routes for operators and load balancers: aborts, descriptions and loads."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..... import __version__
from .....protocol.config.weights import WeightsFiles
from .....protocol.errors import EngineError
from ....http.errors import bad_request, json_response, redact, unavailable
from ...bodies.intake import RouteHandlers, reads
from ...logprobs import Json
from ...routes.capabilities import reads_audio, reads_images
from ...schema.sglang import SglangAbortRequest
from ...serving import Serving


class SglangAborts(RouteHandlers):
    """The route that aborts requests."""

    @reads(SglangAbortRequest)
    async def abort(self, http: Request, body: SglangAbortRequest, size: int) -> Response:
        """Abort the requests with an ID, or all requests."""
        if not body.rid and not body.abort_all:
            raise bad_request("rid", "is required, or abort_all=true")
        return json_response(
            {"aborted": await abort(self._serving, "" if body.abort_all else body.rid)}
        )


async def abort(serving: Serving, request_id: str) -> int:
    """Abort the requests with an ID, or all if it is "", and return their number.

    Raises:
        APIError: The server does not serve yet, or a replica did not answer (503).
    """
    serving.verify_serving()
    try:
        return await serving.engine.calls.abort_requests(request_id)
    except EngineError as error:
        message = f"Some requests were not aborted: {redact(str(error))}"
        raise unavailable(message, serving.retry_after_s) from error


class SglangDescription:
    """The routes that describe the server."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def model(self, http: Request) -> Response:
        """Return the properties of the model."""
        return json_response(self._describe_model())

    async def server(self, http: Request) -> Response:
        """Return the properties of the server, among them the load of each replica, or vLLM's configuration."""
        serving = self._serving
        if http.query_params.get("config_format") == "json":
            return json_response({"vllm_config": self._describe_for_vllm()})
        config, load = serving.config, serving.engine.metrics.read_load()
        return json_response(
            self._describe_model()
            | {
                "version": f"engine-{__version__}",
                "context_length": config.model.max_model_len,
                "max_total_num_tokens": serving.engine.metrics.count_cached_tokens(),
                "page_size": config.cache.block_size,
                "max_running_requests": config.scheduler.max_num_seqs,
                "tp_size": config.parallel.tensor_parallel_size,
                "pp_size": config.parallel.pipeline_parallel_size,
                "dp_size": serving.num_replicas,
                "internal_states": [load],
            }
        )

    async def loads(self, http: Request) -> Response:
        """Return the load of each replica."""
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": f"engine-{__version__}",
                "loads": self._loads(),
            }
        )

    async def older_loads(self, http: Request) -> Response:
        """Return the load of each replica in SGLang's older format."""
        return json_response(
            [
                {
                    "dp_rank": load["dp_rank"],
                    "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
                    "num_waiting_reqs": load["num_waiting_reqs"],
                    "num_tokens": load["num_used_tokens"],
                    "ts_tic": time.monotonic(),
                }
                for load in self._loads()
            ]
        )

    async def weights(self, http: Request) -> Response:
        """Return the name of the weights."""
        return json_response({"weight_version": self._serving.weight_version()})

    def _describe_for_vllm(self) -> Json:
        """Return the fields of vLLM's configuration that trainers read."""
        config = self._serving.config
        parallel, model = config.parallel, config.model
        transfer = config.frontend.weight_transfer_config
        return {
            "model_config": {
                "model": model.model,
                "dtype": "torch." + model.dtype.replace("auto", "bfloat16"),
                "max_model_len": model.max_model_len,
                "logprobs_mode": "raw_logprobs",
            },
            "parallel_config": {
                "tensor_parallel_size": parallel.tensor_parallel_size,
                "pipeline_parallel_size": parallel.pipeline_parallel_size,
                "data_parallel_size": parallel.data_parallel_size,
            },
            "lora_config": {
                "max_lora_rank": model.max_lora_rank,
                "max_loras": config.scheduler.max_loras,
            }
            if model.enable_lora
            else None,
            "weight_transfer_config": msgspec.to_builtins(transfer),
        }

    def _loads(self) -> list[Json]:
        metrics, scheduler = self._serving.engine.metrics, self._serving.config.scheduler
        return [
            {
                "dp_rank": rank,
                "num_running_reqs": stats.num_running,
                "num_waiting_reqs": stats.num_waiting,
                "num_used_tokens": round(stats.kv_cache_usage * num_tokens),
                "max_total_num_tokens": num_tokens,
                "token_usage": stats.kv_cache_usage,
                "max_running_requests": scheduler.max_num_seqs,
            }
            for rank, (stats, num_tokens) in enumerate(
                zip(metrics.read_stats(), metrics.cache_sizes(), strict=True)
            )
        ]

    def _describe_model(self) -> Json:
        serving, model = self._serving, self._serving.config.model
        return {
            "model_path": WeightsFiles(serving.config.run_dir).read_current().path or model.model,
            "served_model_name": serving.served_name,
            "weight_version": serving.weight_version(),
            "tokenizer_path": model.tokenizer_path or model.model,
            "is_generation": model.generates,
            "preferred_sampling_params": serving.config.frontend.default_sampling or None,
            "has_image_understanding": reads_images(serving),
            "has_audio_understanding": reads_audio(serving),
        }
