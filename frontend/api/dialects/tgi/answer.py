"""Write answers in the format of Text Generation Inference."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from typing import Any, Final

from ....client.engine_client import Delta, PositionLogprobs, Sequence
from ....http.errors import APIError
from ....http.json_pieces import encode_list, encode_whole
from ...answer import PromptAnswer, find_likeliest
from ...generation import raise_if_failed
from ...logprobs import Json, LogprobsRenderer, finite
from ...streaming.event_stream import ChunkEncoder, StreamFormat
from .request import TgiError, TgiPrompt

_Utf8: Final = getincrementaldecoder("utf-8")


def _event(content: object) -> bytes:
    return b"data:%b\n\n" % encode_whole(content)


def _encode_error(error: APIError) -> bytes:
    return _event(TgiError(error).body)


TGI_STREAM: Final = StreamFormat(
    content_type=b"text/event-stream",
    keep_alive=b":\n\n",
    done=b"",
    encode_error=_encode_error,
)


class TgiAnswer(PromptAnswer):
    """The answer to a prompt."""

    request: TgiPrompt

    @property
    def shows_prompt(self) -> bool:
        """True if the answer begins with the text of the prompt, or has its tokens."""
        return self.request.shows_prompt or self.request.shows_prompt_tokens

    def whole(self, outputs: list[Delta]) -> Any:
        """Return the complete response body, which is a list at `/`."""
        [best] = find_likeliest(outputs, len(outputs), 1)
        others = [i for i in range(len(outputs)) if i != best]
        answer: Json = {"generated_text": self._text(best, outputs[best])}
        if self.request.shows_details:
            answer["details"] = self._details(best, outputs[best])
            if others:
                candidates = (
                    {"generated_text": self._text(i, outputs[i])} | self._details(i, outputs[i])
                    for i in others
                )
                answer["details"]["best_of_sequences"] = encode_list(candidates, at_once=1)
        return [answer] if self.request.is_list else answer

    def headers(self) -> dict[str, str]:
        """Return the headers with the times of the answer in milliseconds, and the numbers of its tokens."""
        sequence = self._group.sequences[0]
        count = sequence.num_read_tokens
        begin = sequence.scheduled_time or sequence.arrival_time
        queued = max(begin - sequence.arrival_time, 0.0)
        total = max(sequence.finish_time - sequence.arrival_time, 0.0)
        computed = max(total - queued, 0.0)
        prompt = self.prompt_of(sequence).text or ""
        return {
            "x-compute-time": str(total),
            "x-compute-characters": str(len(prompt)),
            "x-total-time": _milliseconds(total),
            "x-validation-time": "0",
            "x-queue-time": _milliseconds(queued),
            "x-inference-time": _milliseconds(computed),
            "x-time-per-token": _milliseconds(computed / max(count, 1)),
            "x-prompt-tokens": str(sequence.num_prompt_tokens),
            "x-generated-tokens": str(count),
        }

    def chunks(self) -> ChunkEncoder:
        """Return the encoder of a stream."""
        return TgiChunks(self)

    def prompt_text(self) -> str:
        """Return the text before the answer, "" if the request does not ask for it."""
        text = self._prompts[0].text if self.request.shows_prompt else ""
        if text is None:
            token_ids = self._prompts[0].token_ids.tolist()
            text = self.serving.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def ending(self, sequence: Sequence, output: Delta, count: int) -> Json:
        """Return why a sequence with `count` tokens ended, and its seed."""
        reason = "length" if output.finish_reason == "length" else "eos_token"
        if output.finish_reason == "stop" and isinstance(output.stop_reason, str):
            reason = "stop_sequence"
        params = sequence.request.sampling_params
        seed = params.seed if params.temperature else None
        return {"finish_reason": reason, "generated_tokens": count, "seed": seed}

    def token(self, token_id: int, logprob: float | None, text: str | None = None) -> Json:
        """Return a generated token. Without a `text`, it has that of the token alone."""
        shown = self.renderer.token(token_id) if text is None else text
        return {
            "id": token_id,
            "text": shown,
            "logprob": None if logprob is None else finite(logprob),
            "special": token_id in self.serving.tokenizer.special_ids,
        }

    def top_tokens(self, position: PositionLogprobs) -> list[Json]:
        """Return the most probable tokens at a position; [] if none are requested."""
        return [self.token(token_id, logprob) for token_id, logprob in position.top]

    def _text(self, position: int, output: Delta) -> str:
        return self.prompt_text() + output.text

    def _details(self, position: int, output: Delta) -> Json:
        sequence, positions = self._group.sequences[position], output.logprobs or []
        texts = TokenTexts(self)
        tokens = (
            self.token(token_id, at.logprob, texts.add(token_id))
            for token_id, at in zip(output.token_ids, positions, strict=True)
        )
        details = self.ending(sequence, output, len(output.token_ids))
        details["prefill"] = encode_list(self._prefill(sequence), at_once=1)
        details["tokens"] = encode_list(tokens, at_once=1)
        if self.request.logprobs:
            details["top_tokens"] = encode_list(map(self.top_tokens, positions), at_once=1)
        return details

    def _prefill(self, sequence: Sequence) -> Iterator[Json]:
        if not self.request.shows_prompt_tokens:
            return
        token_ids: Iterable[int] = self.prompt_of(sequence).token_ids.tolist()
        positions = sequence.iterate_prompt_logprobs()
        for token_id, position in zip(token_ids, positions, strict=True):
            logprob = None if position is None else finite(position.logprob)
            yield {"id": token_id, "text": self.renderer.token(token_id), "logprob": logprob}


class TokenTexts:
    """The text that each token adds to an answer: the last token of a character has all of it."""

    def __init__(self, answer: TgiAnswer) -> None:
        self._renderer: LogprobsRenderer = answer.renderer
        self._tokenizer = answer.serving.tokenizer
        self._decoder = _Utf8("replace")

    def add(self, token_id: int) -> str:
        """Return the text of the next token. Special tokens have their names."""
        if token_id in self._tokenizer.special_ids:
            return self._renderer.token(token_id)
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))


class TgiChunks(ChunkEncoder):
    """Writes an event for each token."""

    format = TGI_STREAM

    def __init__(self, answer: TgiAnswer) -> None:
        self._answer = answer
        self._texts = TokenTexts(answer)
        self._text = answer.prompt_text()
        self._count = 0

    def encode(self, sequence: Sequence) -> bytes:
        """Return the events for the new output."""
        answer = self._answer
        delta = sequence.read_some()
        raise_if_failed(delta)
        self._text += delta.text
        events = []
        pairs = zip(delta.token_ids, delta.logprobs or (), strict=True)
        for number, (token_id, position) in enumerate(pairs, 1):
            self._count += 1
            found: Json = {"index": self._count}
            found["token"] = answer.token(token_id, position.logprob, self._texts.add(token_id))
            if top := answer.top_tokens(position):
                found["top_tokens"] = top
            is_last = delta.finish_reason is not None and number == len(delta.token_ids)
            found |= self._ending(sequence, delta) if is_last else _UNFINISHED
            events.append(_event(found))
        if delta.finish_reason is not None and not delta.token_ids:
            # The last token was sent before it was known to be the last one.
            last: Json = {"index": self._count, "token": answer.token(0, None, "")}
            events.append(_event(last | self._ending(sequence, delta)))
        return b"".join(events)

    def _ending(self, sequence: Sequence, delta: Delta) -> Json:
        details = None
        if self._answer.request.shows_details:
            details = self._answer.ending(sequence, delta, self._count)
            details["input_length"] = sequence.num_prompt_tokens
        return {"generated_text": self._text, "details": details}


_UNFINISHED: Final[Json] = {"generated_text": None, "details": None}


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1e3))
