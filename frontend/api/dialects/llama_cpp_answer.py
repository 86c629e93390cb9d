"""Write answers in the format of llama.cpp's own API."""

from __future__ import annotations

import math
from typing import Any, Final

from ....protocol.sampling_params import DryParams, SamplingParams
from ...client.engine_client import Delta, Sequence
from ...http.json_pieces import EncodedJSON, encode_list
from ..answer import PromptAnswer
from ..generation import PreparedPrompt, raise_if_failed
from ..logprobs import Json, LogprobsRenderer
from ..receipts.timings import llama_prompt_timings, llama_timings
from ..schema import UNLIMITED
from ..streaming.event_stream import ChunkEncoder, StreamFormat, error_with_retry, event
from ..streaming.progress import ProgressChunks
from .llama_cpp_request import LlamaPrompt

LLAMA_STREAM: Final = StreamFormat(
    content_type=b"text/event-stream; charset=utf-8",
    keep_alive=b": keep-alive\n\n",
    done=b"",
    encode_error=lambda error: event(error_with_retry(error)),
)


class EmptyPrompt(PreparedPrompt):
    """A prompt without tokens. The engine computes another one in its place, whose answer is not shown."""


class LlamaAnswer(PromptAnswer):
    """The answer to a completion request in llama.cpp's API."""

    request: LlamaPrompt

    @property
    def shows_prompt(self) -> bool:
        """True, because every result repeats its prompt."""
        return True

    def whole(self, outputs: list[Delta]) -> Any:
        """Return the complete response body: one result, or a list if the request has a list of prompts."""
        sequences = self._group.sequences
        results = (
            Result(self, sequence).whole(output)
            for sequence, output in zip(sequences, outputs, strict=True)
        )
        if self.request.is_list or len(sequences) > 1:
            return encode_list(results, at_once=1)
        return next(results)

    def chunks(self) -> ChunkEncoder:
        """Return the encoder of a stream."""
        chunks = LlamaChunks(self)
        return ProgressChunks(chunks, chunks.progress) if self.request.return_progress else chunks


class Result:
    """The result of one sequence."""

    def __init__(self, answer: LlamaAnswer, sequence: Sequence) -> None:
        self._answer = answer
        self._request = answer.request
        self._sequence = sequence
        self._has_new_line = False
        self._is_empty = isinstance(answer.prompt_of(sequence), EmptyPrompt)

    def whole(self, output: Delta) -> Json:
        """Return the complete result."""
        prompt = self._answer.prompt_of(self._sequence)
        text = prompt.text
        if text is None:
            text = self._answer.serving.tokenizer.decode(prompt.token_ids.tolist())
        content, tokens = self._read(output)
        shown = tokens if self._request.return_tokens else []
        body = {"index": self._sequence.position, "content": content, "tokens": shown}
        return self._select(body | self._ending(output) | {"prompt": text} | self._probs(output))

    def part(self, delta: Delta) -> Json | None:
        """Return the chunk with new output; None if there is none."""
        content, tokens = self._read(delta)
        if not tokens and not content:
            return None
        body = self._partial(content, tokens)
        if self._request.timings_per_token:
            body["timings"] = llama_timings(self._sequence, self._sequence.num_read_tokens)
        return body | self._probs(delta)

    def progress(self, progress: Json) -> Json:
        """Return the chunk with the progress of the prompt."""
        body = self._partial("", []) | {"prompt_progress": progress}
        if self._request.timings_per_token:
            body["timings"] = llama_prompt_timings(progress)
        return body

    def _partial(self, content: str, tokens: list[int]) -> Json:
        return {
            "index": self._sequence.position,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._sequence.num_read_tokens,
            "tokens_evaluated": self._sequence.num_prompt_tokens,
        }

    def last(self, delta: Delta) -> Json:
        """Return the last chunk."""
        body: Json = {"index": self._sequence.position, "content": "", "tokens": []}
        return self._select(body | self._ending(delta))

    def _read(self, delta: Delta) -> tuple[str, list[int]]:
        if self._request.only_computes_prompt or self._is_empty:
            return "", []
        self._has_new_line = self._has_new_line or "\n" in delta.text
        return delta.text, delta.token_ids

    def _ending(self, delta: Delta) -> Json:
        sequence, answer, request = self._sequence, self._answer, self._request
        num_prompt = 0 if self._is_empty else sequence.num_prompt_tokens
        count = 0 if request.only_computes_prompt or self._is_empty else sequence.num_read_tokens
        num_tokens = num_prompt + count
        word = delta.stop_reason if isinstance(delta.stop_reason, str) else ""
        kind = "word" if word else "eos"
        if delta.finish_reason == "length" or request.only_computes_prompt:
            kind, word = "limit", ""
        if self._is_empty:
            kind, word = "none", ""
        max_model_len = answer.serving.config.model.max_model_len
        return {
            "id_slot": -1,
            "stop": True,
            "model": answer.envelope["model"],
            "tokens_predicted": count,
            "tokens_evaluated": num_prompt,
            "generation_settings": generation_settings(sequence.params, request),
            "has_new_line": self._has_new_line,
            "truncated": kind == "limit" and num_tokens >= max_model_len,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": num_tokens,
            "timings": llama_timings(sequence, count),
        }

    def _probs(self, delta: Delta) -> Json:
        if self._request.logprobs is None or delta.logprobs is None:
            return {}
        if self._request.only_computes_prompt or self._is_empty:
            return {}
        renderer, is_final = self._answer.renderer, self._request.post_sampling_probs
        return {"completion_probabilities": _probabilities(delta, renderer, is_final=is_final)}

    def _select(self, body: Json) -> Json:
        """Return the fields of the result that the request asks for."""
        if not self._request.response_fields:
            return body
        found: Json = {}
        for path in self._request.response_fields:
            value: Any = body
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found


class LlamaChunks(ChunkEncoder):
    """Writes the events of an answer."""

    format = LLAMA_STREAM

    def __init__(self, answer: LlamaAnswer) -> None:
        self._answer = answer
        self._results: dict[int, Result] = {}

    def encode(self, sequence: Sequence) -> bytes:
        """Return the events for the new output."""
        result = self._result(sequence)
        delta = sequence.read_some()
        raise_if_failed(delta)
        part = result.part(delta)
        chunk = b"" if part is None else event(part)
        return chunk if delta.finish_reason is None else chunk + event(result.last(delta))

    def progress(self, sequence: Sequence, progress: Json) -> bytes:
        """Return the event with the progress of a sequence's prompt."""
        return event(self._result(sequence).progress(progress))

    def _result(self, sequence: Sequence) -> Result:
        result = self._results.get(sequence.position)
        if result is None:
            result = self._results[sequence.position] = Result(self._answer, sequence)
        return result


def generation_settings(params: SamplingParams, request: LlamaPrompt) -> Json:
    """Return the settings of an answer under llama.cpp's names."""
    num_tokens = -1 if request.max_tokens == UNLIMITED else request.max_tokens
    if request.only_computes_prompt:
        num_tokens = 0
    dry = params.dry or DryParams()
    return {
        "n_predict": num_tokens,
        "max_tokens": num_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "top_n_sigma": params.top_n_sigma or -1.0,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "dynatemp_range": params.dynatemp_range,
        "dynatemp_exponent": params.dynatemp_exponent,
        "dry_multiplier": dry.multiplier,
        "dry_base": dry.base,
        "dry_allowed_length": dry.allowed_length,
        "dry_penalty_last_n": dry.last_n,
        "dry_sequence_breakers": list(dry.sequence_breakers),
        "repeat_last_n": -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "logit_bias": [{"token": t, "bias": bias} for t, bias in (params.logit_bias or {}).items()],
        "n_probs": params.logprobs or 0,
        "post_sampling_probs": params.processed_logprobs,
        "stream": bool(request.stream),
        "grammar": request.grammar or "",
        "samplers": ["penalties", "dry", *params.sampler_order],
    }


def _probabilities(delta: Delta, renderer: LogprobsRenderer, *, is_final: bool) -> EncodedJSON:
    """Return the log-probabilities of each token and of the most probable ones.

    If `is_final`, these are probabilities, and tokens that cannot be drawn are left out.
    """

    def token(token_id: int, logprob: float) -> Json:
        shown: Json = {"id": token_id} | renderer.chat_token(token_id, logprob)
        if is_final:
            del shown["logprob"]
            shown["prob"] = math.exp(logprob)
        return shown

    tops = "top_probs" if is_final else "top_logprobs"
    return encode_list(
        (
            token(position.token_id, position.logprob)
            | {tops: [token(*each) for each in position.top if not is_final or each[1] > -math.inf]}
            for position in delta.logprobs or ()
        ),
        at_once=1,
    )
