"""The class `LLM`: generate, chat, embed, classify, score and transcribe from Python, without a server."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import msgspec

from ...protocol.errors import EngineError, ParameterError
from ...protocol.file_identity import LoraAdapter
from ...protocol.sampling_params import SamplingParams
from ..chat import ChatTemplate, ModelTemplates, PairTemplate, SpecialTokenGuard, prepare_formats
from ..cli.arguments import Settings, settings_of
from ..client.beam_search import BeamSearch, BeamSearchParams
from ..client.embeddings import (
    DOCUMENT,
    QUERY,
    class_scores,
    cosines,
    embedding_params,
    find_prompt,
    finish_vector,
    verify_compares,
    verify_dimensions,
    verify_embeds,
)
from ..client.encoder_inputs import without_bad_words
from ..client.engine_client import RequestGroup, SequenceRequest
from ..client.sequence_io import params_for_output
from ..media.transcription.options import Task, TranscriptionOptions, parse_language
from ..media.transcription.transcriber import Transcript
from ..tokenizer.text_pairs import TextPair
from .local_engine import LocalEngine
from .local_transcriber import AudioClip, LocalTranscriber
from .loras import LoraChoice, OfflineLoras
from .outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    request_output,
)
from .prompts import EncodedPrompt, Prompt, PromptEncoder, as_list

Message: TypeAlias = Mapping[str, Any]

DEFAULTS: Final = {"log_stats": False, "max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
"""Options whose defaults differ from those of a server. The queue is unlimited, because a batch is in memory anyway."""


class LLM:
    """A model and its processes, which run until `close` or the end of a `with` block. It is thread-safe.

    Args:
        model: A directory, a `.gguf` file or a hub name; None for the default model.
        keywords: The flags of `engine serve`, such as `max_model_len=4096`. `log_stats` is off by default.

    Raises:
        EngineError: The engine cannot start.
    """

    def __init__(self, model: str | None = None, **keywords: Any) -> None:
        self._serve(settings_of({"model": model} | DEFAULTS | keywords))

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return a model with the given settings, as `parse_settings` returns them."""
        llm = cls.__new__(cls)
        llm._serve(settings)  # noqa: SLF001
        return llm

    def _serve(self, settings: Settings) -> None:
        self._engine = LocalEngine(settings)
        self._numbers = itertools.count()
        self._templates: dict[str | None, ModelTemplates] = {}
        policy = self._engine.config.frontend.special_tokens_in_text
        self._special_tokens = SpecialTokenGuard(self._engine.tokenizer, policy)
        self._prompts = PromptEncoder(self._engine)
        self._transcriber: LocalTranscriber | None = None
        self._loras = OfflineLoras(self._engine.config.model)
        atexit.register(self.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoraChoice | Sequence[LoraChoice] = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt and return the outputs in the order of the prompts.

        Args:
            prompts: One prompt or a list of them.
            sampling_params: Sampling parameters for all prompts, or one per prompt. The default is the model's own.
            lora_request: The LoRA adapter to use, for all prompts, or one per prompt: the name of one of
                `lora_modules`, or a `LoRARequest`, which is loaded on first use. The default is the base model.

        Raises:
            ParameterError: A prompt or parameter is invalid; nothing was generated.
        """
        wanted = as_list(prompts)
        encoded = [self._prompts.encode(prompt) for prompt in wanted]
        return self._generate(encoded, sampling_params, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoraChoice | Sequence[LoraChoice] = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, and return the outputs in their order.

        Args:
            messages: One conversation or a list of them.
            sampling_params: Parameters for all conversations, or one per conversation. The default is the model's own.
            chat_template: A template or the path of one, instead of the model's own.
            add_generation_prompt: Whether the prompt ends with the start of an assistant message.
            continue_final_message: Whether the model continues the last message.
            tools: Function definitions in OpenAI's format.
            chat_template_kwargs: Extra variables for the template.
            lora_request: As for `generate`.

        Raises:
            ParameterError: There is no chat template, or a parameter is invalid.
            ChatTemplateError: The template rejects the messages.
        """
        conversations: Any = (
            [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        template = self._template(chat_template, bool(tools))
        prompts: list[EncodedPrompt] = []
        for conversation in conversations:
            conversation, media = self._prompts.take_media(conversation)
            text = template.render(
                conversation,
                self._special_tokens,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            prompts.append(
                self._prompts.encode_text(
                    text,
                    media,
                    lambda text: self._special_tokens.encode(text, add_special_tokens=False),
                )
            )
        return self._generate(prompts, sampling_params, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        lora_request: LoraChoice = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed every prompt and return the vectors in the order of the prompts.

        Args:
            prompts: One prompt or a list of them.
            dimensions: The number of leading elements to keep, for models trained for it; None for all.
            normalize: Whether vectors are scaled to L2 norm 1. The default is the model's own.
            prompt_name: The model's prompt to put before every text. The default is the model's own.
            lora_request: The LoRA adapter to use, as for `generate`. The default is the base model.

        Raises:
            ParameterError: A prompt or parameter is invalid; nothing was embedded.
            EngineError: A prompt failed.
        """
        model = self._engine.config.model
        verify_embeds(model)
        verify_dimensions(dimensions, model.pooler)
        instruction = find_prompt(prompt_name, model.pooler)
        wanted = [self._prompts.encode_tokens(prompt, instruction) for prompt in as_list(prompts)]
        request_id, pooled = self._pool([TextPair(ids, 0) for ids in wanted], lora_request)
        outputs = []
        for token_ids, vector in zip(wanted, pooled, strict=True):
            embedding = finish_vector(
                vector, model.pooler, dimensions=dimensions, normalize=normalize
            )
            outputs.append(
                EmbeddingRequestOutput(request_id, token_ids, EmbeddingOutput(embedding.tolist()))
            )
        return outputs

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        lora_request: LoraChoice = None,
    ) -> list[ClassificationRequestOutput]:
        """Classify every prompt with the model's head and return the classes in the order of the prompts.

        Args:
            prompts: One prompt or a list of them.
            use_activation: False returns the scores (logits) instead of probabilities.
            lora_request: The LoRA adapter to use, as for `generate`. The default is the base model.

        Raises:
            ParameterError: The model has no classification head, or a prompt is invalid; nothing was classified.
            EngineError: A prompt failed.
        """
        model = self._engine.config.model
        if model.classifier is None:
            raise ParameterError("model", f"{model.served_names[0]} has no classification head")
        wanted = [self._prompts.encode_tokens(prompt) for prompt in as_list(prompts)]
        request_id, pooled = self._pool([TextPair(ids, 0) for ids in wanted], lora_request)
        outputs = []
        for token_ids, vector in zip(wanted, pooled, strict=True):
            scores = class_scores(vector, model.classifier, activate=use_activation)
            label = model.classifier.labels[int(scores.argmax())]
            result = ClassificationOutput(scores.tolist(), label)
            outputs.append(ClassificationRequestOutput(request_id, token_ids, result))
        return outputs

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_activation: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoraChoice = None,
    ) -> list[ScoringRequestOutput]:
        """Score how well each second text matches its first one. Return the scores in the order of the second texts.

        A model with a classification head of one class reads both texts together. For any other model, the score is the
        cosine similarity of the texts' embeddings.

        Args:
            text_1: One text for all, or as many texts as in `text_2`.
            text_2: One text or a list of them.
            use_activation: False returns the scores (logits) instead of probabilities.
            chat_template: The template for pairs of texts, or its path, for a decoder that reads them together.
            chat_template_kwargs: Extra variables for the template.
            lora_request: The LoRA adapter to use, as for `generate`. The default is the base model.

        Raises:
            ParameterError: The model has several classes, or a text is invalid; nothing was scored.
            EngineError: A pair failed.
        """
        model = self._engine.config.model
        verify_compares(model)
        firsts, seconds = _as_texts(text_1), _as_texts(text_2)
        if len(firsts) not in (1, len(seconds)):
            raise ParameterError("text_1", f"has {len(firsts)} texts, text_2 has {len(seconds)}")
        if model.classifier is None:
            prompts = [
                *((text, QUERY) for text in firsts),
                *((text, DOCUMENT) for text in seconds),
            ]
            wanted = [
                TextPair(self._prompts.encode_tokens(text, model.pooler.prompts.get(name, "")), 0)
                for text, name in prompts
            ]
            request_id, pooled = self._pool(wanted, lora_request)
            scores = cosines(pooled, len(firsts), model.pooler)
            wanted = wanted[len(firsts) :]
        else:
            firsts *= 1 if len(firsts) == len(seconds) else len(seconds)
            pairs = zip(firsts, seconds, strict=True)
            tokenizer = self._engine.tokenizer
            chat_template = chat_template or self._engine.config.frontend.chat_template
            if chat_template is None:
                wanted = [
                    tokenizer.pair_joiner.join(
                        tokenizer.encode(first, add_special_tokens=False),
                        tokenizer.encode(second, add_special_tokens=False),
                    )
                    for first, second in pairs
                ]
            else:
                template = PairTemplate(self._template(chat_template, False), self._special_tokens)
                kwargs = chat_template_kwargs or {}
                wanted = [TextPair(list(template.encode(*pair, kwargs)), 0) for pair in pairs]
            request_id, pooled = self._pool(wanted, lora_request)
            scores = [
                class_scores(vector, model.classifier, activate=use_activation).item()
                for vector in pooled
            ]
        return [
            ScoringRequestOutput(request_id, pair.token_ids, ScoringOutput(score))
            for pair, score in zip(wanted, scores, strict=True)
        ]

    def transcribe(
        self,
        audio: AudioClip | Sequence[AudioClip],
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str = "",
        temperature: float = 0.0,
        timestamps: Sequence[str] = ("segment",),
    ) -> list[Transcript]:
        """Transcribe every clip, and return the transcripts in the order of the audio clips.

        Args:
            audio: One clip or a list of them: the path or the content of a file, or a pair of samples and their rate.
            language: The spoken language by its code or name. The default is to detect it.
            task: "transcribe", or "translate" to write English.
            prompt: Text that the model continues, as an example of style and spelling.
            temperature: 0 decodes greedily, and tries higher temperatures if a text repeats itself or is doubtful.
            timestamps: The kinds of times to return: "segment", "word" or both.

        Raises:
            ParameterError: The model does not support the task, or an audio clip cannot be read.
            EngineError: An audio clip failed.
        """
        if self._transcriber is None:
            self._transcriber = LocalTranscriber(self._engine)
        options = TranscriptionOptions(
            task=Task(task),
            language=parse_language(language, self._transcriber.audio),
            prompt=prompt,
            temperature=temperature,
            has_segments="segment" in timestamps,
            has_words="word" in timestamps,
        )
        is_one = isinstance(audio, str | bytes | Path | tuple)
        clips: Any = [audio] if is_one else audio
        return self._transcriber.transcribe(clips, options, self._numbers)

    def _pool(self, prompts: list[TextPair], lora_request: LoraChoice) -> tuple[str, list[bytes]]:
        """Return the ID of a request and the pooled vector of each of its prompts."""
        lora = self._loras.find(lora_request)
        pooling, params = self._engine.config.model.pooling_params, embedding_params()
        sequences = [
            SequenceRequest(
                prompt.token_ids,
                params,
                pooling=msgspec.structs.replace(pooling, second_segment=prompt.second_segment),
                lora=lora,
            )
            for prompt in prompts
        ]
        request_id = str(next(self._numbers))
        if not sequences:
            return request_id, []
        return request_id, self._engine.run(self._run_pooling(sequences, request_id))

    async def _run_pooling(self, sequences: list[SequenceRequest], request_id: str) -> list[bytes]:
        group = await self._engine.client.submit(sequences, request_id=request_id)
        try:
            for delta in await group.result():
                if delta.error is not None:
                    raise EngineError(delta.error)
        finally:
            group.abort()
        return [sequence.pooled for sequence in group.sequences]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoraChoice = None,
    ) -> list[BeamSearchOutput]:
        """Return the most probable continuations of every prompt, in the order of the prompts.

        Args:
            prompts: One prompt or a list of them.
            params: The parameters of the search.
            lora_request: The LoRA adapter to use, as for `generate`. The default is the base model.

        Raises:
            ParameterError: A prompt or parameter is invalid.
            EngineError: A step of the search failed.
        """
        lora = self._loras.find(lora_request)
        params.verify(self._engine.config.frontend.max_logprobs)
        wanted = [self._prompts.encode_tokens(prompt) for prompt in as_list(prompts)]
        return self._engine.run(self._beam_search(wanted, params, lora))

    async def _beam_search(
        self, prompts: list[list[int]], params: BeamSearchParams, lora: LoraAdapter | None
    ) -> list[BeamSearchOutput]:
        engine = self._engine
        search = BeamSearch(
            engine.client, params, engine.config.model.eos_token_ids, str(next(self._numbers))
        )
        results = SamplingParams(max_tokens=params.max_tokens)
        requests = [SequenceRequest(prompt, results, lora=lora) for prompt in prompts]
        group = await search.run(requests)
        outputs = zip(group.read_all(), search.logprobs, strict=True)
        return [
            BeamSearchOutput(
                [
                    BeamSearchSequence(
                        [*prompt, *delta.token_ids], delta.text, logprob, delta.finish_reason
                    )
                    for delta, logprob in itertools.islice(outputs, len(results))
                ]
            )
            for prompt, results in zip(prompts, group.outputs_by_prompt(), strict=True)
        ]

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters in the model's generation config."""
        return SamplingParams(**self._engine.config.frontend.default_sampling)  # type: ignore[arg-type]

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. Return False if running requests prevented it."""
        return self._engine.run(self._engine.client.calls.reset_prefix_cache())

    def close(self) -> None:
        """Stop the processes. Later calls do nothing."""
        atexit.unregister(self.close)
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _template(self, instead: str | None, with_tools: bool) -> ChatTemplate:
        if instead not in self._templates:
            config, tokenizer = self._engine.config, self._engine.tokenizer
            templates = ModelTemplates(tokenizer, instead, architecture=config.model.architecture)
            prepare_formats(config.frontend, templates)
            self._templates[instead] = templates
        template = self._templates[instead].choose(with_tools)
        if template is None:
            raise ParameterError("chat_template", "is required: this model has no chat template")
        return template

    def _generate(
        self,
        prompts: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoraChoice | Sequence[LoraChoice],
    ) -> list[RequestOutput]:
        has_images = [bool(prompt.encoder_inputs) for prompt in prompts]
        loras = self._loras.find_each(lora_request, has_images)
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ParameterError(
                "sampling_params", f"has {len(sampling_params)} entries for {len(prompts)} prompts"
            )
        if (source := self._engine.config.model.source_text) is not None:
            sampling_params = [without_bad_words(each, source) for each in sampling_params]
        return self._engine.run(self._collect(prompts, sampling_params, loras))

    async def _collect(
        self,
        prompts: list[EncodedPrompt],
        params: Sequence[SamplingParams],
        loras: Sequence[LoraAdapter | None],
    ) -> list[RequestOutput]:
        groups: list[RequestGroup] = []
        try:
            for prompt, each, lora in zip(prompts, params, loras, strict=True):
                sequences = [
                    SequenceRequest(
                        prompt.token_ids,
                        params_for_output(each, j),
                        lora=lora,
                        encoder_inputs=list(prompt.encoder_inputs),
                    )
                    for j in range(each.n)
                ]
                request_id = str(next(self._numbers))
                groups.append(await self._engine.client.submit(sequences, request_id=request_id))
            return [
                request_output(group, prompt.text, prompt.token_ids, await group.result())
                for group, prompt in zip(groups, prompts, strict=True)
            ]
        finally:
            for group in groups:
                group.abort()


def _as_texts(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)
