"""The methods of `LLM` that return vectors, classes and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast, get_args

import msgspec
import numpy as np

from ...protocol.config.frontend import ContentFormat
from ...protocol.errors import EngineError, ParameterError
from ...protocol.pooling_params import PoolingKind
from ..chat import ChatTemplate, ModelTemplates, PairTemplate, SpecialTokenGuard, prepare_formats
from ..client.embeddings import (
    DOCUMENT,
    QUERY,
    LateChunkingMetadata,
    Vector,
    chunk_means,
    class_scores,
    embedding_params,
    find_kind,
    find_prompt,
    finish_vectors,
    read_vectors,
    similarities,
    verify_classifies,
    verify_compares,
    verify_dimensions,
    verify_embeds,
    verify_embeds_texts,
)
from ..client.encoder_inputs import pooled_source
from ..client.engine_client import SequenceRequest
from .list_ranking import ListPrompts, score_in_lists
from .local_engine import LocalEngine
from .loras import LoraChoice, OfflineLoras
from .outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from .params import PoolingParams, each_params
from .progress import ProgressBar, progress_bar
from .prompts import EncodedPrompt, Prompt, PromptEncoder, as_list

Comparable: TypeAlias = str | Mapping[str, Any]
"""A text, or a mapping with the parts of a message as `content`."""


class PoolingMethods:
    """The methods of `LLM` that pool the hidden states of prompts, and what they need."""

    _engine: LocalEngine
    _loras: OfflineLoras
    _numbers: Iterator[int]
    _prompts: PromptEncoder
    _special_tokens: SpecialTokenGuard
    _templates: dict[tuple[str | None, str], ModelTemplates]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoraChoice = None,
        use_tqdm: ProgressBar = False,
    ) -> list[EmbeddingRequestOutput]:
        """Embed every prompt and return the vectors in the order of the prompts.

        Args:
            prompts: One prompt or a list of them.
            dimensions: The number of leading elements to keep, for models trained for it; None for all.
            normalize: True if vectors are scaled to L2 norm 1. The default is the model's own.
            prompt_name: The model's prompt to put before every text. The default is the model's own.
            pooling_params: vLLM's parameters for all prompts, or one per prompt. The other arguments take precedence.
            tokenization_kwargs: As for `generate`. Texts are cut at their end by default.
            lora_request: The LoRA adapter to use, as for `generate`. The default is the base model.
            use_tqdm: True shows a progress bar, as for `generate`.

        Raises:
            ParameterError: A prompt or parameter is invalid; nothing was embedded.
            EngineError: A prompt failed.
        """
        model = self._engine.config.model
        verify_embeds_texts(model)
        instruction = find_prompt(prompt_name, model.pooler)
        wanted = self._encode_each(prompts, tokenization_kwargs, instruction)
        given = each_params(pooling_params, ("embed",), len(wanted))
        for size in {dimensions, *(each.dimensions for each in given)}:
            verify_dimensions(size, model.pooler)
        request_id, pooled = self._pool(wanted, lora_request, use_tqdm)
        outputs = []
        for prompt, vector, params in zip(wanted, pooled, given, strict=True):
            embedding = finish_vectors(
                vector,
                model.pooler,
                dimensions=dimensions or params.dimensions,
                normalize=params.activates if normalize is None else normalize,
            )
            outputs.append(
                EmbeddingRequestOutput(
                    request_id, prompt.token_ids, EmbeddingOutput(embedding.tolist())
                )
            )
        return outputs

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoraChoice = None,
        use_tqdm: ProgressBar = False,
    ) -> list[ClassificationRequestOutput]:
        """Classify every prompt with the model's head and return the classes in the order of the prompts.

        Args:
            prompts: One prompt or a list of them.
            use_activation: False returns the scores (logits) instead of probabilities.
            pooling_params: vLLM's parameters for all prompts, or one per prompt. The other arguments take precedence.
            tokenization_kwargs: As for `generate`. Texts are cut at their end by default.
            lora_request: The LoRA adapter to use, as for `generate`. The default is the base model.
            use_tqdm: True shows a progress bar, as for `generate`.

        Raises:
            ParameterError: The model has no classification head, or a prompt is invalid; nothing was classified.
            EngineError: A prompt failed.
        """
        classifier = verify_classifies(self._engine.config.model)
        wanted = self._encode_each(prompts, tokenization_kwargs)
        given = each_params(pooling_params, ("classify",), len(wanted))
        request_id, pooled = self._pool(wanted, lora_request, use_tqdm)
        outputs = []
        for prompt, vector, params in zip(wanted, pooled, given, strict=True):
            activate = params.activates if use_activation is None else use_activation
            scores = class_scores(vector, classifier, activate=activate)
            label = classifier.labels[int(scores.argmax())]
            result = ClassificationOutput(scores.tolist(), label)
            outputs.append(ClassificationRequestOutput(request_id, prompt.token_ids, result))
        return outputs

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_activation: bool | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoraChoice = None,
        use_tqdm: ProgressBar = False,
    ) -> list[PoolingRequestOutput]:
        """Return the embedding or the class probabilities of every prompt, or of each of its tokens.

        Args:
            prompts: One prompt or a list of them.
            pooling_task: "embed" or "token_embed", or for a model with a classification head "classify" or
                "token_classify". The default is what the model was trained for.
            use_activation: False returns embeddings that are not normalized, and scores instead of probabilities.
            pooling_params: vLLM's parameters for all prompts, or one per prompt. The other arguments take precedence.
            tokenization_kwargs: As for `generate`. Texts are cut at their end by default.
            lora_request: The LoRA adapter to use, as for `generate`. The default is the base model.
            use_tqdm: True shows a progress bar, as for `generate`.

        Raises:
            ParameterError: The model does not perform the task, or a prompt is invalid; nothing was computed.
            EngineError: A prompt failed.
        """
        model = self._engine.config.model
        if pooling_task is None and isinstance(pooling_params, PoolingParams):
            pooling_task = pooling_params.task
        if model.classifier is None:
            verify_embeds(model)
        instruction = find_prompt(None, model.pooler)
        wanted = self._encode_each(prompts, tokenization_kwargs, instruction)
        given = each_params(pooling_params, (pooling_task,) if pooling_task else (), len(wanted))
        kind = find_kind(pooling_task, model)
        for size in {each.dimensions for each in given}:
            verify_dimensions(size, model.pooler)
        chunked = [
            self._chunks(*each, kind, tokenization_kwargs)
            for each in zip(wanted, given, strict=True)
        ]
        sizes = [None if each is None else each.chunk_size for each in chunked]
        request_id, pooled = self._pool(wanted, lora_request, use_tqdm, kind, sizes)
        outputs = []
        for prompt, vectors, params, chunks in zip(wanted, pooled, given, chunked, strict=True):
            activate = params.activates if use_activation is None else use_activation
            if model.classifier is None:
                vectors = finish_vectors(
                    vectors,
                    model.pooler,
                    dimensions=params.dimensions,
                    normalize=activate,
                    kind=kind,
                )
            else:
                vectors = class_scores(vectors, model.classifier, activate=activate)
            result = PoolingOutput(vectors.tolist())
            outputs.append(PoolingRequestOutput(request_id, prompt.token_ids, result, chunks))
        return outputs

    def score(
        self,
        text_1: Comparable | Sequence[Comparable],
        text_2: Comparable | Sequence[Comparable],
        *,
        use_activation: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        pooling_params: PoolingParams | None = None,
        lora_request: LoraChoice = None,
        use_tqdm: ProgressBar = False,
    ) -> list[ScoringRequestOutput]:
        """Score how well each second text matches its first one. Return the scores in the order of the second texts.

        A model with a classification head of one class reads both texts together. For any other model, the score is the
        similarity of the texts' embeddings: their cosine, or MaxSim if each token has an embedding.

        A model that ranks lists reads one first text and all second texts in one prompt. `instruction` in
        `chat_template_kwargs` becomes a part of it.

        If the model reads images, a text may be a mapping with `content`: the parts of a message.

        Args:
            text_1: One text for all, or as many texts as in `text_2`.
            text_2: One text or a list of them.
            use_activation: False returns the scores (logits) instead of probabilities.
            chat_template: The template for pairs of texts, or its path, for a decoder that reads them together.
            chat_template_kwargs: Extra variables for the template.
            pooling_params: vLLM's parameters, of which only `use_activation` has an effect.
            lora_request: The LoRA adapter to use, as for `generate`. The default is the base model.
            use_tqdm: True shows a progress bar, as for `generate`.

        Raises:
            ParameterError: The model has several classes, or a text is invalid; nothing was scored.
            EngineError: A pair failed.
        """
        model = self._engine.config.model
        verify_compares(model)
        if use_activation is None and pooling_params is not None:
            use_activation = pooling_params.activates
        firsts, seconds = _as_texts(text_1), _as_texts(text_2)
        if len(firsts) not in (1, len(seconds)):
            raise ParameterError(
                "text_1",
                f"must have one text, or as many as text_2 ({len(seconds)}), got {len(firsts)}",
            )
        if (ranking := model.pooler.ranking) is not None:
            return score_in_lists(
                ListPrompts(ranking, self._prompts, self._engine.tokenizer),
                (firsts, seconds),
                (chat_template_kwargs or {}).get("instruction"),
                lambda prompts: self._pool(prompts, lora_request, use_tqdm),
            )
        if model.classifier is None:
            prompts = [
                *((text, QUERY) for text in firsts),
                *((text, DOCUMENT) for text in seconds),
            ]
            wanted = [self._encode_compared(each, role) for each, role in prompts]
            request_id, pooled = self._pool(wanted, lora_request, use_tqdm)
            scores = similarities(pooled, len(firsts), model.pooler)
            wanted = wanted[len(firsts) :]
        else:
            firsts *= 1 if len(firsts) == len(seconds) else len(seconds)
            pairs = zip(firsts, seconds, strict=True)
            tokenizer = self._engine.tokenizer
            chat_template = chat_template or self._engine.config.frontend.chat_template
            given = None if chat_template is None else self._template(chat_template, False)
            template = PairTemplate.find(model.classifier, given, self._special_tokens)
            if template is None:
                if not all(isinstance(text, str) for text in (*firsts, *seconds)):
                    raise ParameterError("chat_template", "is required to score images")
                joined = (
                    tokenizer.pair_joiner.join(
                        tokenizer.encode(first, add_special_tokens=False),
                        tokenizer.encode(second, add_special_tokens=False),
                    )
                    for first, second in pairs
                )
                wanted = [
                    EncodedPrompt(None, pair.token_ids, second_segment=pair.second_segment)
                    for pair in joined
                ]
            else:
                kwargs = chat_template_kwargs or {}
                wanted = [self._encode_pair(template, pair, kwargs) for pair in pairs]
            request_id, pooled = self._pool(wanted, lora_request, use_tqdm)
            scores = [
                class_scores(vector, model.classifier, activate=use_activation).item()
                for vector in pooled
            ]
        return [
            ScoringRequestOutput(request_id, prompt.token_ids, ScoringOutput(score))
            for prompt, score in zip(wanted, scores, strict=True)
        ]

    def _encode_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        tokenization_kwargs: Mapping[str, Any] | None,
        instruction: str = "",
    ) -> list[EncodedPrompt]:
        tokenization = self._prompts.tokenization(tokenization_kwargs)
        return [
            self._prompts.encode_pooled(prompt, instruction, tokenization=tokenization)
            for prompt in as_list(prompts)
        ]

    def _chunks(
        self,
        prompt: EncodedPrompt,
        params: PoolingParams,
        kind: PoolingKind,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> LateChunkingMetadata | None:
        """Return the chunks of a text that `params` ask for, if any.

        Raises:
            ParameterError: The results are not vectors of tokens, or the tokens are not those of a text.
        """
        if params.late_chunking_params is None:
            return None
        if kind is not PoolingKind.ALL or self._engine.config.model.classifier is not None:
            raise ParameterError("late_chunking_params", "needs the task token_embed")
        adds = self._prompts.tokenization(tokenization_kwargs).add_special_tokens
        text = None if prompt.encoder_inputs else prompt.text
        return LateChunkingMetadata.of_text(
            params.late_chunking_params,
            text,
            prompt.token_ids,
            self._engine.tokenizer,
            has_special=adds,
        )

    def _encode_compared(self, given: Comparable, role: str) -> EncodedPrompt:
        """Return a text, or the content of a user's message, to be compared with others.

        `role` is the name of the model's prompt for a text.
        """
        pooler = self._engine.config.model.pooler
        if isinstance(given, str):
            return self._prompts.encode_pooled(given, pooler.prompts.get(role, ""), role)
        message = {"role": "user", "content": given["content"]}
        conversation, media = self._prompts.take_media([message])
        text = self._template(None, False).render(
            conversation, self._special_tokens, add_generation_prompt=False
        )
        # The tokenizer of an encoder, not its template, adds the special tokens.
        is_encoder = self._engine.config.model.is_encoder
        if is_encoder and not media:
            return self._prompts.encode_pooled(self._special_tokens.encode_whole(text)[0], "", role)
        if is_encoder:
            return self._prompts.encode_text(text, media, self._special_tokens.encode_whole)
        return self._prompts.encode_text(
            text, media, lambda text: self._special_tokens.encode(text, add_special_tokens=False)
        )

    def _encode_pair(
        self,
        template: PairTemplate,
        pair: tuple[Comparable, Comparable],
        kwargs: dict[str, Any],
    ) -> EncodedPrompt:
        """Return the template's prompt for a query and a document."""
        messages = [
            {"role": role, "content": each if isinstance(each, str) else each["content"]}
            for role, each in zip((QUERY, DOCUMENT), pair, strict=True)
        ]
        taken, media = self._prompts.take_media(template.ordered(*messages))
        query, document = template.ordered(*taken)
        text = template.render(query["content"], document["content"], kwargs)
        return self._prompts.encode_text(text, media, template.encode)

    def _pool(
        self,
        prompts: list[EncodedPrompt],
        lora_request: LoraChoice,
        use_tqdm: ProgressBar,
        kind: PoolingKind | None = None,
        chunk_sizes: Sequence[int | None] | None = None,
    ) -> tuple[str, list[Vector]]:
        """Return the ID of a request and the result of each of its prompts, by default as the model was trained.

        Prompts with a chunk size have the mean of the results of as many tokens each.
        """
        lora, model = self._loras.find(lora_request), self._engine.config.model
        kind = model.pooler.kind if kind is None else kind
        pooling, params = model.pooling_params_of(kind), embedding_params()
        read = [
            pooled_source(model.source_text, np.array(prompt.token_ids, np.int32))
            for prompt in prompts
        ]
        sequences = [
            SequenceRequest(
                token_ids,
                params,
                pooling=msgspec.structs.replace(
                    pooling,
                    second_segment=prompt.second_segment,
                    num_visible=prompt.num_visible,
                ),
                lora=lora,
                encoder_inputs=inputs or list(prompt.encoder_inputs),
            )
            for prompt, (token_ids, inputs) in zip(prompts, read, strict=True)
        ]
        request_id = str(next(self._numbers))
        if not sequences:
            return request_id, []
        with progress_bar(use_tqdm, len(sequences)) as advance:
            pooled = self._engine.run(self._run_pooling(sequences, request_id, advance))
        results = []
        for each, prompt, size in zip(
            pooled, prompts, chunk_sizes or [None] * len(prompts), strict=True
        ):
            token_ids = np.array(prompt.token_ids, np.int32)
            if size is None:
                results.append(read_vectors(each, kind, model, token_ids, prompt.keeps_T))
            else:
                vectors = np.frombuffer(each, np.float32).reshape(len(token_ids), -1)
                results.append(chunk_means(vectors, size))
        return request_id, results

    async def _run_pooling(
        self,
        sequences: list[SequenceRequest],
        request_id: str,
        advance: Callable[[int], object],
    ) -> list[bytes]:
        group = await self._engine.client.submit(sequences, request_id=request_id)
        try:
            while updated := await group.wait_for_updates():
                for sequence in updated:
                    if (error := sequence.read().error) is not None:
                        raise EngineError(error)
                advance(sum(sequence.finished for sequence in updated))
        finally:
            group.abort()
        return [sequence.pooled for sequence in group.sequences]

    def _template(
        self, instead: str | None, with_tools: bool, content_format: str = "auto"
    ) -> ChatTemplate:
        if content_format not in get_args(ContentFormat):
            names = ", ".join(get_args(ContentFormat))
            raise ParameterError(
                "chat_template_content_format", f"must be one of {names}, got {content_format!r}"
            )
        key = instead, content_format
        if key not in self._templates:
            config, tokenizer = self._engine.config, self._engine.tokenizer
            templates = ModelTemplates(
                tokenizer,
                instead or config.model.pooler.chat_template or None,
                architecture=config.model.architecture,
                content_format=cast(ContentFormat, content_format),
                defaults=config.frontend.default_chat_template_kwargs,
            )
            prepare_formats(config.frontend, templates)
            self._templates[key] = templates
        template = self._templates[key].choose(with_tools)
        if template is None:
            raise ParameterError("chat_template", "is required: this model has no chat template")
        return template


def _as_texts(texts: Comparable | Sequence[Comparable]) -> list[Any]:
    return [texts] if isinstance(texts, str | Mapping) else list(texts)
