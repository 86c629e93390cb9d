"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .body import BodyDecoder, read_body
from .chat_prompt import render_chat
from .errors import bad_request, json_response
from .prompts import parse_token_ids
from .schema import DetokenizeRequest, TokenizeRequest
from .serving import Serving


class Tokenization:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        strict = serving.config.frontend.strict
        self._tokenize_decoder = BodyDecoder(TokenizeRequest, strict)
        self._detokenize_decoder = BodyDecoder(DetokenizeRequest, strict)

    async def tokenize(self, http: Request) -> Response:
        """A text, or a conversation as its prompt would be written."""
        body = await self._body(http)
        request = self._tokenize_decoder.decode(body)
        serving = self._serving
        serving.verify_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("prompt", "exactly one of prompt and messages is required")
        if request.prompt is not None:
            [token_ids] = await serving.encode(
                [request.prompt], request.add_special_tokens is not False
            )
        else:
            chat = await render_chat(
                serving, request, len(body), add_special_tokens=bool(request.add_special_tokens)
            )
            token_ids = chat.token_ids
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": serving.config.model.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if request.return_token_strs:
            answer["token_strs"] = [serving.tokenizer.id_to_token(t) for t in token_ids]
        return json_response(answer)

    async def detokenize(self, http: Request) -> Response:
        request = self._detokenize_decoder.decode(await self._body(http))
        serving = self._serving
        serving.verify_model(request.model)
        if request.tokens is None:
            raise bad_request("tokens", "tokens is required")
        if request.tokens:
            parse_token_ids(request.tokens, "tokens", serving.config.model.vocab_size)
        text = await serving.off_loop.run(
            len(request.tokens),
            serving.tokenizer.decode,
            request.tokens,
            bool(request.skip_special_tokens),
        )
        return json_response({"prompt": text})

    async def _body(self, http: Request) -> bytes:
        limit = self._serving.config.frontend.max_body_bytes
        return await read_body(http.scope, http.receive, limit)
