"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ...http.errors import APIError, bad_request, json_response
from ...http.json_pieces import encode_list
from ..bodies.body import BodyDecoder
from ..bodies.intake import Intake
from ..chat_prompt import render_chat
from ..openapi import accepts
from ..prompts import parse_token_ids
from ..schema import DetokenizeRequest, TokenizeRequest
from ..serving import Serving
from ..tools.tool_definitions import tools_for_template

MAX_CHARACTERS: Final = 1 << 22
"""Maximum characters of a text; tokenizing takes up to 80 bytes of memory per character."""


class Tokenization:
    """Routes that tokenize and detokenize."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        self._serving = serving
        self._intake = intake
        strict = serving.config.frontend.strict
        self._tokenize_decoder = BodyDecoder(TokenizeRequest, strict)
        self._detokenize_decoder = BodyDecoder(DetokenizeRequest, strict)

    @accepts(TokenizeRequest)
    async def tokenize(self, http: Request) -> Response:
        """Return the token ids of a text, or of the prompt for a conversation."""
        with self._intake.lease() as lease:
            request, body_size = await self._intake.receive(
                http.scope, http.receive, self._tokenize_decoder, lease
            )
            return await self._tokenize(request, body_size)

    async def _tokenize(self, request: TokenizeRequest, body_size: int) -> Response:
        serving = self._serving
        serving.verify_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("prompt", "exactly one of prompt and messages is required")
        serving.verify_tokenizer("messages" if request.prompt is None else "prompt")
        if request.prompt is not None:
            if len(request.prompt) > MAX_CHARACTERS:
                raise bad_request(
                    "prompt",
                    f"prompt must have at most {MAX_CHARACTERS} characters, got {len(request.prompt)}; "
                    "tokenize it in parts",
                )
            [token_ids] = await serving.encode(
                [request.prompt], request.add_special_tokens is not False
            )
        else:
            chat = await render_chat(
                serving,
                request,
                body_size,
                tools=tools_for_template(request.tools),
                add_special_tokens=bool(request.add_special_tokens),
            )
            token_ids = chat.token_ids
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": serving.config.model.max_model_len,
        }

        def encode() -> Response:
            answer["tokens"] = encode_list(token_ids)
            answer["token_strs"] = None
            if request.return_token_strs:
                answer["token_strs"] = encode_list(map(serving.tokenizer.id_to_token, token_ids))
            return json_response(answer)

        return await serving.executor.run(len(token_ids), encode)

    @accepts(DetokenizeRequest)
    async def detokenize(self, http: Request) -> Response:
        """Return the text of token ids."""
        with self._intake.lease() as lease:
            request, _ = await self._intake.receive(
                http.scope, http.receive, self._detokenize_decoder, lease
            )
            return await self._detokenize(request)

    async def _detokenize(self, request: DetokenizeRequest) -> Response:
        serving = self._serving
        serving.verify_model(request.model)
        tokens = request.tokens
        if tokens is None:
            raise bad_request("tokens", "tokens is required")
        serving.verify_tokenizer("tokens")

        def decode() -> str:
            if tokens:
                parse_token_ids(tokens, "tokens", serving.config.model.vocab_size)
            return serving.tokenizer.decode(tokens, bool(request.skip_special_tokens))

        text = await serving.executor.run(len(tokens), decode)
        return json_response({"prompt": text})

    async def tokenizer_info(self, http: Request) -> Response:
        """Return the tokenizer's configuration, with the chat template in use."""
        serving = self._serving
        if not serving.config.frontend.enable_tokenizer_info:
            raise APIError(404, "This server was started without --enable-tokenizer-info-endpoint")
        info = await serving.executor.in_thread(serving.tokenizer.read_config)
        with contextlib.suppress(APIError):
            info["chat_template"] = serving.chat_template(with_tools=False).source
        return json_response({"tokenizer_class": "PreTrainedTokenizerFast"} | info)
