"""`POST /v1/embeddings` and `POST /pooling`."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.config.model import ModelConfig
from ....protocol.pooling_params import PoolingKind
from ...client.embeddings import (
    LateChunkingMetadata,
    LateChunkingParams,
    Vector,
    chunk_means,
    class_scores,
    find_kind,
    find_prompt,
    finish_vectors,
    join_parts,
    read_vectors,
    verify_classifies,
    verify_dimensions,
    verify_embeds,
    verify_embeds_texts,
)
from ...client.engine_client import RequestGroup
from ...http.errors import (
    bad_request,
    bytes_response,
    echo,
    json_response,
    renamer,
    renaming,
    verify_choice,
)
from ...http.json_pieces import encode_list
from ...media.sources.media_options import parse_media_options
from ..bodies.intake import Intake, RouteHandlers, reads
from ..inputs.given_media import GivenMedia
from ..pooling import Pooling, render_input
from ..prompts import BYTES_PER_TOKEN_ID, Prompt, parse_inputs, verify_num_sequences
from ..schema import (
    ClassificationRequest,
    EmbeddingRequest,
    InputFields,
    PoolingFields,
    PoolingRequest,
)
from ..serving import Serving
from .float8 import FLOAT8_TYPES, to_float8

ENCODING_FORMATS: Final = ("float", "base64", "bytes", "bytes_only")
"""The last two are vLLM's: the body has the bytes of all vectors, and the header `metadata` says where each is."""

MAX_METADATA: Final = 32768
"""Maximum bytes of the header `metadata`. Many clients reject an answer whose headers exceed 64 KiB."""

DTYPES: Final = {
    "float32": "f4",
    "float16": "f2",
    "bfloat16": "u2",
    "fp8_e4m3": "u1",
    "fp8_e5m2": "u1",
}
"""`embed_dtype` -> the code of the type in NumPy. The bits of types that it does not have are an integer."""

BYTE_ORDERS: Final = {"native": "=", "little": "<", "big": ">"}
"""`endianness` -> the code of the byte order in NumPy."""

_PROMPTS: Final = {"": None, "query": "query", "passage": "document"}
"""The end of a `task` in Jina's API -> the name of the prompt."""


class Embeddings(RouteHandlers):
    """The routes that return a vector or a class for each input."""

    def __init__(self, serving: Serving, intake: Intake, pooling: Pooling) -> None:
        super().__init__(serving, intake)
        self._pooling = pooling

    @reads(EmbeddingRequest)
    async def embed(self, http: Request, request: EmbeddingRequest, body_size: int) -> Response:
        """Return an embedding of each input, or of each of its chunks."""
        if request.content is not None and request.input is None:
            return await self._embed_content(http, request, body_size)
        request = self._for_task(request)
        if request.late_chunking_params is not None:
            return await self._embed_chunks(http, request, body_size, request.late_chunking_params)

        def answer(group: RequestGroup, vectors: Iterator[Vector], lengths: list[int]) -> Response:
            return self._vectors(request, "embd", ("embedding", "embedding"), group, vectors)

        if self._serving.config.model.pooler.kind is PoolingKind.ALL:
            verify_choice("encoding_format", request.encoding_format, ("float",))
        return await self.run(http, request, body_size, answer, verify=verify_embeds)

    @reads(EmbeddingRequest)
    async def embed_content(
        self, http: Request, request: EmbeddingRequest, body_size: int
    ) -> Response:
        """Return the vectors of each text, or of its tokens, as a list in llama.cpp's format."""
        if request.content is None and request.input is None:
            raise bad_request("content", "is required, or input in its place")
        return await self._embed_content(http, request, body_size)

    async def _embed_content(
        self, http: Request, request: EmbeddingRequest, body_size: int
    ) -> Response:
        name = "input" if request.content is None else "content"
        given = msgspec.structs.replace(request, input=getattr(request, name))
        if request.embd_normalize is not None:
            given.normalize = request.embd_normalize >= 0

        def answer(group: RequestGroup, vectors: Iterator[Vector], lengths: list[int]) -> Response:
            rows = (
                {"index": i, "embedding": np.atleast_2d(vector).tolist()}
                for i, vector in enumerate(vectors)
            )
            return json_response(encode_list(rows, at_once=1))

        with renaming(renamer({"input": name})):
            return await self.run(http, given, body_size, answer, verify=verify_embeds)

    async def _embed_chunks(
        self,
        http: Request,
        request: EmbeddingRequest,
        body_size: int,
        params: LateChunkingParams,
    ) -> Response:
        """Return an embedding of each chunk of each input, the mean of the vectors of its tokens."""
        verify_choice("encoding_format", request.encoding_format, ("float",))
        serving = self._serving
        pooler = serving.config.model.pooler
        inputs = await self._embedded_inputs(request, body_size)
        kind = find_kind("token_embed", serving.config.model)

        def entries(group: RequestGroup) -> Iterator[dict[str, Any]]:
            for index, (each, sequence) in enumerate(zip(inputs, group.sequences, strict=True)):
                chunks = LateChunkingMetadata.of_text(
                    params,
                    None if each.encoder_inputs else each.text,
                    each.token_ids.tolist(),
                    serving.tokenizer,
                    has_special=request.add_special_tokens is not False,
                )
                tokens_TD = np.frombuffer(sequence.pooled, np.float32)
                vectors = finish_vectors(
                    chunk_means(tokens_TD.reshape(len(each.token_ids), -1), params.chunk_size),
                    pooler,
                    dimensions=request.dimensions,
                    normalize=_normalizes(request),
                )
                yield {
                    "object": "embedding",
                    "index": index,
                    "embedding": vectors.tolist(),
                    "late_chunking": msgspec.to_builtins(chunks),
                }

        answer = partial(self._answer, request, "embd", entries)
        return await self._pooling.run(http, request, inputs, kind, answer)

    def _for_task(self, request: EmbeddingRequest) -> EmbeddingRequest:
        """Return the request with the adapter and the prompt of its task, if the model has adapters for tasks.

        Raises:
            APIError: The model has no adapter for the task (400), or is not served (404).
        """
        model, given = self._serving.config.model, request.task
        if given is None or model.default_lora is None:
            return request
        self._serving.verify_model(request.model)
        if request.model and request.model not in model.served_names:
            raise bad_request(
                "task", f"cannot be used with the adapter {echo(request.model)} as model"
            )
        tasks = [each.name for each in model.loras]
        task, _, side = given.partition(".")
        if task not in tasks or side not in _PROMPTS:
            raise bad_request(
                "task",
                f"must be one of {', '.join(tasks)}, which may end with .query or .passage, got {echo(given)}",
            )
        prompt_name = _PROMPTS[side] or request.prompt_name
        return msgspec.structs.replace(request, model=task, prompt_name=prompt_name)

    async def run(
        self,
        http: Request,
        request: EmbeddingRequest,
        body_size: int,
        answer: Callable[[RequestGroup, Iterator[Vector], list[int]], Response],
        media: Sequence[GivenMedia | None] = (),
        verify: Callable[[ModelConfig], None] = verify_embeds_texts,
    ) -> Response:
        """Embed the inputs of a request, and return the result of `answer` for the embeddings and the inputs' lengths.

        Each input has its `media`, if there are any. `verify` raises ParameterError if the model has no such vectors.

        Raises:
            APIError: The request is invalid (400), or the engine cannot accept it now.
        """
        model = self._serving.config.model
        verify(model)
        kind = model.pooler.kind
        inputs = await self._embedded_inputs(request, body_size)
        for each, given in zip(inputs, media, strict=False):
            each.given_media = given
        return await self._pooling.run(
            http,
            request,
            inputs,
            kind,
            lambda group: answer(
                group,
                self._results(request, group, inputs, kind),
                [len(each.token_ids) for each in inputs],
            ),
            splits=True,
        )

    @reads(PoolingRequest)
    async def pool(self, http: Request, request: PoolingRequest, body_size: int) -> Response:
        """Return the vector of each input: its embedding, or its class probabilities."""
        if request.late_chunking_params is not None:
            raise bad_request("late_chunking_params", "is not supported; use /v1/embeddings")
        model = self._serving.config.model
        kind = find_kind(request.task, model)
        if kind is PoolingKind.WEIGHTS and request.dimensions is not None:
            raise bad_request(
                "dimensions", "must be omitted, because this task returns a weight for each token"
            )
        if model.classifier is None:
            inputs = await self._embedded_inputs(request, body_size)
        else:
            _verify_encoding(request)
            inputs = await self._inputs(request, body_size)

        def answer(group: RequestGroup) -> Response:
            vectors = self._results(request, group, inputs, kind)
            return self._vectors(request, "pooling", ("pooling", "data"), group, vectors)

        splits = model.classifier is None and kind is model.pooler.kind
        return await self._pooling.run(http, request, inputs, kind, answer, splits=splits)

    @reads(ClassificationRequest)
    async def classify(
        self, http: Request, request: ClassificationRequest, body_size: int
    ) -> Response:
        """Return the class of each input, and the probabilities of all classes."""
        model = self._serving.config.model
        classifier, kind = verify_classifies(model), find_kind(None, model)
        inputs = await self._inputs(request, body_size)

        def entries(group: RequestGroup) -> Iterator[dict[str, Any]]:
            for index, sequence in enumerate(group.sequences):
                scores = class_scores(
                    np.frombuffer(sequence.pooled, np.float32),
                    classifier,
                    activate=request.use_activation,
                )
                yield {
                    "index": index,
                    "label": classifier.labels[int(scores.argmax())],
                    "probs": scores.tolist(),
                    "num_classes": len(scores),
                }

        answer = partial(self._answer, request, "classify", entries)
        return await self._pooling.run(http, request, inputs, kind, answer)

    async def _inputs(self, request: InputFields, body_size: int) -> list[Prompt]:
        """Return the inputs of a request. Texts are not encoded yet."""
        serving = self._serving
        if request.messages is None:
            vocab_size, size = serving.config.model.vocab_size, body_size // BYTES_PER_TOKEN_ID

            def encode(text: str, add_special_tokens: bool) -> list[int]:
                serving.verify_tokenizer("input", "send token ids")
                return list(serving.tokenizer.encode(text, add_special_tokens))

            inputs = await serving.executor.run(
                size, parse_inputs, request.input, vocab_size, "input", encode
            )
            _choose_options(request, inputs)
            return inputs
        if request.input is not None:
            raise bad_request("messages", "must be omitted if input is given")
        return [
            await render_input(serving, request, conversation, param, body_size)
            for conversation, param in _conversations(request.messages)
        ]

    async def _embedded_inputs(self, request: EmbeddingRequest, body_size: int) -> list[Prompt]:
        """Return the inputs of a request for embeddings after verifying its fields.

        Raises:
            APIError: The value of a field is not allowed, or the model does not embed (400).
        """
        _verify_encoding(request)
        model = self._serving.config.model
        verify_embeds(model)
        verify_dimensions(request.dimensions, model.pooler)
        instruction = find_prompt(request.prompt_name, model.pooler)
        inputs = await self._inputs(request, body_size)
        for each in inputs:
            each.instruction, each.role = instruction, request.prompt_name or ""
        return inputs

    def _results(
        self,
        request: EmbeddingRequest,
        group: RequestGroup,
        inputs: list[Prompt],
        kind: PoolingKind,
    ) -> Iterator[Vector]:
        """Return the embeddings or class probabilities of each input: a vector, or a row for each token."""
        model = self._serving.config.model
        finish = partial(
            finish_vectors,
            pooler=model.pooler,
            dimensions=request.dimensions,
            normalize=_normalizes(request),
            kind=kind,
        )
        remaining = iter(group.sequences)
        for each in inputs:
            parts = list(islice(remaining, each.num_parts))
            found = [
                read_vectors(part.pooled, kind, model, each.token_ids, each.keeps_T)
                for part in parts
            ]
            if model.classifier is not None:
                yield class_scores(found[0], model.classifier, activate=request.use_activation)
            elif len(parts) == 1:
                yield finish(found[0])
            else:
                lengths = [part.num_prompt_tokens for part in parts]
                yield finish(join_parts([finish(vector) for vector in found], lengths))

    def _vectors(
        self,
        request: EmbeddingRequest,
        kind: str,
        names: tuple[str, str],
        group: RequestGroup,
        vectors: Iterator[Vector],
    ) -> Response:
        """Return the answer with vectors. `names` are the type of an entry and the name of its vector in JSON."""
        if request.encoding_format in ("bytes", "bytes_only"):
            return self._bytes(request, kind, group, vectors)

        def entries(_: RequestGroup) -> Iterator[dict[str, Any]]:
            for index, vector in enumerate(vectors):
                yield {"object": names[0], "index": index, names[1]: _encoded(vector, request)}

        return self._answer(request, kind, entries, group)

    def _bytes(
        self, request: EmbeddingRequest, kind: str, group: RequestGroup, vectors: Iterator[Vector]
    ) -> Response:
        """Return the answer with the bytes of the vectors, in vLLM's format.

        Raises:
            APIError: The description of so many vectors does not fit into a header (400).
        """
        pieces: list[bytes] = []
        entries: list[dict[str, Any]] = []
        end = 0
        for index, vector in enumerate(vectors):
            pieces.append(_to_bytes(vector, request))
            start, end = end, end + len(pieces[-1])
            entries.append(
                {
                    "index": index,
                    "embed_dtype": request.embed_dtype or "float32",
                    "endianness": request.endianness or "native",
                    "start": start,
                    "end": end,
                    "shape": vector.shape,
                }
            )
        if request.encoding_format == "bytes_only":
            return bytes_response(pieces, {})
        metadata = json.dumps(self._envelope(request, kind, group) | {"data": entries})
        if len(metadata) > MAX_METADATA:
            raise bad_request(
                "encoding_format",
                f'must be "bytes_only" for {len(pieces)} vectors, because their description has '
                f"{len(metadata)} bytes, and the header has at most {MAX_METADATA}",
            )
        return bytes_response(pieces, {"metadata": metadata})

    def _answer(
        self,
        request: PoolingFields,
        kind: str,
        entries: Callable[[RequestGroup], Iterator[dict[str, Any]]],
        group: RequestGroup,
    ) -> Response:
        data = encode_list(entries(group), at_once=1)
        envelope = self._envelope(request, kind, group)
        return json_response({"object": "list"} | envelope | {"data": data})

    def _envelope(self, request: PoolingFields, kind: str, group: RequestGroup) -> dict[str, Any]:
        """Return the fields of an answer beside its data."""
        return {
            "id": f"{kind}-{group.request_id}",
            "created": int(time.time()),
            "model": self._serving.answering_model(request.model),
            "usage": usage_of(group),
        }


class EmbeddingRoutes(RouteHandlers):
    """The routes of another API, whose requests are translated to those of `Embeddings.run`."""

    def __init__(self, serving: Serving, intake: Intake, embeddings: Embeddings) -> None:
        super().__init__(serving, intake)
        self._embeddings = embeddings


def _conversations(messages: list[Any]) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """Yield each conversation of a request with its name in errors."""
    if not messages:
        raise bad_request("messages", "must not be empty")
    if all(isinstance(each, dict) for each in messages):
        yield messages, "messages"
        return
    verify_num_sequences(len(messages), "messages")
    for i, conversation in enumerate(messages):
        if not isinstance(conversation, list):
            raise bad_request(f"messages[{i}]", "must be a list of messages, as others are")
        yield conversation, f"messages[{i}]"


def _choose_options(request: InputFields, inputs: list[Prompt]) -> None:
    """Read media of inputs as the request wants it. Raise APIError 400 if it has an invalid field."""
    if all(each.given_media is None for each in inputs):
        return
    with renaming(str):
        options = parse_media_options(request.mm_processor_kwargs, request.media_io_kwargs)
    for each in inputs:
        if each.given_media is not None:
            each.given_media = each.given_media._replace(options=options)


def usage_of(group: RequestGroup) -> dict[str, int]:
    """Return the token usage of a request."""
    num_tokens = sum(sequence.num_prompt_tokens for sequence in group.sequences)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _normalizes(request: EmbeddingRequest) -> bool | None:
    return request.use_activation if request.normalize is None else request.normalize


def _verify_encoding(request: EmbeddingRequest) -> None:
    verify_choice("encoding_format", request.encoding_format, ENCODING_FORMATS)
    verify_choice("embed_dtype", request.embed_dtype, DTYPES)
    verify_choice("endianness", request.endianness, BYTE_ORDERS)


def _encoded(vector: Vector, request: EmbeddingRequest) -> Any:
    if request.encoding_format == "base64":
        return base64.b64encode(_to_bytes(vector, request)).decode()
    return vector.tolist()


def _to_bytes(vector: Vector, request: EmbeddingRequest) -> bytes:
    """Return the bytes of a vector in the type and the byte order of the request."""
    name = request.embed_dtype or "float32"
    dtype = BYTE_ORDERS[request.endianness or "native"] + DTYPES[name]
    numbers: npt.NDArray[Any] = vector
    if name == "bfloat16":
        numbers = _bfloat16_bits(vector)
    elif name in FLOAT8_TYPES:
        numbers = to_float8(vector, name)
    return numbers.astype(dtype, copy=False).tobytes()


def _bfloat16_bits(vector: Vector) -> npt.NDArray[np.uint32]:
    """Return the 16 bits of each finite number, rounded to the nearest bfloat16, and to an even one between two."""
    bits = np.ascontiguousarray(vector).view(np.uint32)
    half, one, shift = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
    return (bits + half + ((bits >> shift) & one)) >> shift
