"""vLLM's route `/generative_scoring`: the probabilities of labels as the next token after a query and each item."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ....client.engine_client import Delta
from ....http.errors import bad_request
from ...answer import PromptAnswer
from ...logprobs import Json
from ...prompts import BYTES_PER_TOKEN_ID, Prompt, parse_prompts, verify_num_characters
from ...routes.completions import Completions
from ...schema import CompletionRequest
from ...schema.vllm import GenerativeScoringRequest


class LabelPrompts(CompletionRequest, kw_only=True):
    """A completion request with one prompt for each item of a `scoring` request."""

    scoring: GenerativeScoringRequest

    def sent_name(self, name: str) -> str:
        """Return the name of a field in the scoring request."""
        return "label_token_ids" if name == "logprob_token_ids" else name


class ScoringAnswer(PromptAnswer):
    """The probabilities of the labels for each item."""

    request: LabelPrompts

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        data = [
            {"index": index, "object": "score", "score": scores[0], "scores": scores}
            for index, scores in enumerate(map(self.scores, outputs))
        ]
        return self.envelope | {"data": data, "usage": self.usage()}

    def scores(self, output: Delta) -> list[float]:
        """Return the probabilities of the labels for an item."""
        [position] = output.logprobs or ()
        logprobs = np.array([logprob for _, logprob in position.top])
        if self.request.scoring.apply_softmax and np.isfinite(logprobs.max()):
            logprobs -= np.logaddexp.reduce(logprobs)
        scores: list[float] = np.exp(logprobs).tolist()
        return scores


class GenerativeScoring(Completions):
    """The endpoint that scores items. Each needs one step, and shares the prefix of the query with the others.

    `applies_softmax` is the default of the field `apply_softmax`.
    """

    body_schema = GenerativeScoringRequest
    id_prefix = "generative-scoring"
    applies_softmax: ClassVar[bool] = True
    answer_type = ScoringAnswer
    object_type = "list"

    async def _translate(self, body: GenerativeScoringRequest, size: int) -> CompletionRequest:
        if not body.label_token_ids:
            raise bad_request("label_token_ids", "is required, and must not be empty")
        if body.apply_softmax is None:
            body.apply_softmax = self.applies_softmax
        prompts = LabelPrompts(
            scoring=body,
            model=body.model,
            max_tokens=1,
            temperature=0.0,
            logprobs=0,
            logprob_token_ids=body.label_token_ids,
            priority=body.priority,
            cache_salt=body.cache_salt,
            user=body.user,
        )
        return prompts

    async def _prompts(self, request: CompletionRequest, body_size: int) -> list[Prompt]:
        assert isinstance(request, LabelPrompts)
        body = request.scoring
        has_special = body.add_special_tokens is not False
        [query] = await self._encode(body.query, "query", has_special, body_size)
        texts = [body.items] if isinstance(body.items, str) else body.items
        items = await self._encode(texts, "items", False, body_size)
        pairs = [(item, query) if body.item_first else (query, item) for item in items]
        return [
            Prompt(f"items[{i}]", None, np.concatenate(pair).astype(np.int32))
            for i, pair in enumerate(pairs)
        ]

    async def _encode(
        self, texts: Any, param: str, has_special: bool, body_size: int
    ) -> list[npt.NDArray[np.int32]]:
        """Return the token ids of the prompts in a field.

        Raises:
            APIError: The field is missing or invalid, or a text is too long (400).
        """
        serving, model = self._serving, self._serving.config.model
        prompts = await serving.executor.run(
            body_size // BYTES_PER_TOKEN_ID, parse_prompts, texts, model.prompt_vocab_size, param
        )
        for prompt in prompts:
            if prompt.text is not None:
                serving.verify_tokenizer(prompt.param)
                verify_num_characters(len(prompt.text), prompt.param, model.max_model_len)
        encoded = await serving.encode([prompt.text or "" for prompt in prompts], has_special)
        return [
            prompt.token_ids if prompt.text is None else np.asarray(token_ids, np.int32)
            for prompt, token_ids in zip(prompts, encoded, strict=True)
        ]
