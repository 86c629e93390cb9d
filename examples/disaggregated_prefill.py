"""A proxy for servers that compute prompts (prefill) and servers that generate (decode)."""

import argparse
import itertools
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

PREFILL_ONLY = {
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    "stream": False,
}
"""The fields by which a server computes a prompt, and holds its KV cache for another server."""

NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens", "background")

LIMITS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"max_tokens": 1},
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1, "store": False},
}
"""The routes, each with the fields by which a server that computes a prompt generates as little as possible."""

KEPT_HEADERS = ("authorization", "x-api-key")


class Proxy:
    """Sends each prompt to a prefill server, then the request to a decode server, which fetches the prompt's KV cache.

    The servers of each kind take turns. If a prefill server fails, the decode server computes the prompt.
    """

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._client = httpx.AsyncClient(timeout=None)

    async def answer(self, request: Request) -> Response:
        """Return the decode server's answer to a request, as it arrives."""
        body: dict[str, Any] = await request.json()
        headers = {"x-request-id": request.headers.get("x-request-id") or uuid.uuid4().hex}
        headers |= {name: request.headers[name] for name in KEPT_HEADERS if name in request.headers}
        path = request.url.path
        params = await self._compute_prompt(path, body, headers)
        if params:
            body["kv_transfer_params"] = params
        upstream = await self._client.send(
            self._client.build_request(
                "POST", next(self._decode) + path, json=body, headers=headers
            ),
            stream=True,
        )

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in upstream.aiter_bytes():
                    yield piece
            finally:
                # A client that has left ends the request, and the server releases its blocks.
                await upstream.aclose()

        content_type = upstream.headers.get("content-type")
        return StreamingResponse(pieces(), upstream.status_code, media_type=content_type)

    async def _compute_prompt(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """Return where the KV cache of a request's prompt is, or None if no server has computed it."""
        kept = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
        url = next(self._prefill) + path
        kept |= PREFILL_ONLY | LIMITS[path]
        try:
            answer = await self._client.post(url, json=kept, headers=headers)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            # The decode server computes the prompt, or reports what is wrong with the request.
            print(f"{url}: {error}", flush=True)
            return None
        params: dict[str, Any] | None = answer.json().get("kv_transfer_params")
        return params

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def create_app(prefill: list[str], decode: list[str]) -> FastAPI:
    """Return the proxy as an application."""
    proxy = Proxy(prefill, decode)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await proxy.close()

    app = FastAPI(lifespan=lifespan)
    for path in LIMITS:
        app.post(path)(proxy.answer)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, port, task in (("prefill", 8100, "compute prompts"), ("decode", 8200, "generate")):
        url = f"http://127.0.0.1:{port}"
        about = f"Servers that {task} (default: {url})"
        parser.add_argument(f"--{name}", nargs="+", metavar="URL", default=[url], help=about)
    parser.add_argument(
        "--port",
        type=int,
        default=int(os.environ.get("PORT", "8000")),
        help="Port to listen on (default: $PORT, or 8000)",
    )
    args = parser.parse_args()
    uvicorn.run(create_app(args.prefill, args.decode), host="127.0.0.1", port=args.port)
