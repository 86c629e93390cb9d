"""The class `LLM`: generate, chat, embed, classify, score and transcribe from Python, without a server."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from ...protocol.file_identity import LoraAdapter
from ...protocol.sampling_params import SamplingParams
from ..chat import ModelTemplates, SpecialTokenGuard
from ..cli.arguments import Settings, parse_settings, settings_of
from ..client.beam_search import BeamSearch, BeamSearchParams
from ..client.engine_client import RequestGroup, SequenceRequest
from ..media.transcription.options import Task, TranscriptionOptions, parse_language
from ..media.transcription.transcriber import Transcript
from .control import ControlMethods
from .drop_in.tokenizer import ModelTokenizer
from .local_engine import LocalEngine
from .local_transcriber import AudioClip, LocalTranscriber
from .loras import LoraChoice, OfflineLoras
from .outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput, request_output
from .pooling import PoolingMethods
from .progress import ProgressBar, progress_bar
from .prompts import EncodedPrompt, Prompt, PromptEncoder, as_list
from .requests import OfflineRequests, each_priority

if TYPE_CHECKING:
    from .drop_in.engine_args import Options

Message: TypeAlias = Mapping[str, Any]

DEFAULTS: Final = {"log_stats": False, "max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
"""Options whose defaults differ from those of a server. The queue is unlimited, because a batch is in memory anyway."""


class LLM(PoolingMethods, ControlMethods):
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
    def from_flags(cls, flags: Sequence[str]) -> Self:
        """Return a model with flags of `engine serve`. Invalid flags exit with code 2."""
        defaults = (
            f"--no-{name}" if value is False else f"--{name}={value}"
            for name, value in DEFAULTS.items()
        )
        llm = cls.__new__(cls)
        llm._serve(parse_settings([*defaults, *flags]))  # noqa: SLF001
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: Options) -> Self:
        """Return a model with the options of an `EngineArgs`."""
        return cls(**engine_args.keywords())

    def _serve(self, settings: Settings) -> None:
        self._engine = LocalEngine(settings)
        self._numbers = itertools.count()
        self._templates: dict[tuple[str | None, str], ModelTemplates] = {}
        policy = self._engine.config.frontend.special_tokens_in_text
        self._special_tokens = SpecialTokenGuard(self._engine.tokenizer, policy)
        self._prompts = PromptEncoder(self._engine)
        self._transcriber: LocalTranscriber | None = None
        self._loras = OfflineLoras(self._engine.config.model)
        self._requests = OfflineRequests(self._engine, self._prompts, self._loras, self._numbers)
        self._queued: list[tuple[RequestGroup, EncodedPrompt]] = []
        atexit.register(self.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoraChoice | Sequence[LoraChoice] = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: ProgressBar = False,
    ) -> list[RequestOutput]:
        """Generate for every prompt and return the outputs in the order of the prompts.

        Args:
            prompts: One prompt or a list of them.
            sampling_params: Sampling parameters for all prompts, or one per prompt. The default is the model's own.
                Outputs end at the end of the context, even if `max_tokens` is larger.
            lora_request: The LoRA adapter to use, for all prompts, or one per prompt: the name of one of
                `lora_modules`, or a `LoRARequest`, which is loaded on first use. The default is the base model.
            priority: The priority of all prompts, or one per prompt. Lower numbers are served first.
            tokenization_kwargs: vLLM's `truncate_prompt_tokens` (-1 for the context), `truncation_side`
                and `add_special_tokens`, or transformers' `truncation` and `max_length`. Long prompts lose their start
                by default.
            use_tqdm: True shows a progress bar, if the package `tqdm` is installed. A function creates the bar.

        Raises:
            ParameterError: A prompt or parameter is invalid; nothing was generated.
        """
        wanted = self._requests.encode(prompts, tokenization_kwargs)
        return self._generate(wanted, sampling_params, lora_request, priority, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoraChoice | Sequence[LoraChoice] = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: ProgressBar = False,
    ) -> list[str]:
        """Start to generate as `generate` does, and return the IDs of the requests. `wait_for_completion` ends them.

        `use_tqdm` has no effect, because nothing is waited for.
        """
        wanted = self._requests.encode(prompts, tokenization_kwargs)
        return self._enqueue(wanted, sampling_params, lora_request, priority)

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ProgressBar = False,
        lora_request: LoraChoice | Sequence[LoraChoice] = None,
        priority: int | Sequence[int] | None = None,
        **preprocessing: Any,
    ) -> list[str]:
        """Start to answer as `chat` does, and return the IDs of the requests. `wait_for_completion` ends them.

        `use_tqdm` has no effect, because nothing is waited for.
        """
        prompts = self.preprocess_chat(messages, **preprocessing)
        return self._enqueue(prompts, sampling_params, lora_request, priority)

    def wait_for_completion(
        self, output_type: object = None, *, use_tqdm: ProgressBar = False
    ) -> list[RequestOutput]:
        """Return the outputs of all prompts that were passed to `enqueue` or `enqueue_chat`, in their order.

        `output_type` has no effect.
        """
        queued, self._queued = self._queued, []
        with progress_bar(use_tqdm, len(queued)) as advance:
            return self._engine.run(self._collect(queued, advance))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ProgressBar = False,
        lora_request: LoraChoice | Sequence[LoraChoice] = None,
        priority: int | Sequence[int] | None = None,
        **preprocessing: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, and return the outputs in their order.

        Args:
            messages: One conversation or a list of them.
            sampling_params: Parameters for all conversations, or one per conversation. The default is the model's own.
            use_tqdm: As for `generate`.
            lora_request: As for `generate`.
            priority: As for `generate`.
            preprocessing: Arguments of `preprocess_chat`.

        Raises:
            ParameterError: There is no chat template, or a parameter is invalid.
            ChatTemplateError: The template rejects the messages.
        """
        prompts = self.preprocess_chat(messages, **preprocessing)
        return self._generate(prompts, sampling_params, lora_request, priority, use_tqdm)

    def preprocess_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[EncodedPrompt]:
        """Return the prompts of one or more conversations, which `generate` and `enqueue` take.

        Args:
            messages: One conversation or a list of them.
            chat_template: A template or the path of one, instead of the model's own.
            chat_template_content_format: The form in which the template reads contents, "string" or "openai" (a list
                of parts); "auto" finds it out.
            add_generation_prompt: True if the prompt ends with the start of an assistant message.
            continue_final_message: True if the model continues the last message.
            tools: Function definitions in OpenAI's format.
            chat_template_kwargs: Extra variables for the template.
            tokenization_kwargs: As for `generate`. The template has all special tokens by default.
            mm_processor_kwargs: `{"use_audio_in_video": True}` to read the sound of videos.

        Raises:
            ParameterError: There is no chat template, or a parameter is invalid.
            ChatTemplateError: The template rejects the messages.
        """
        conversations: Any = (
            [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        template = self._template(chat_template, bool(tools), chat_template_content_format)
        tokenization = self._prompts.tokenization(
            {"add_special_tokens": False} | dict(tokenization_kwargs or {})
        )
        prompts: list[EncodedPrompt] = []
        for conversation in conversations:
            conversation, media = self._prompts.take_media(conversation, mm_processor_kwargs)
            text = template.render(
                conversation,
                self._special_tokens,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            encoded = self._prompts.encode_text(
                text,
                media,
                lambda text: self._special_tokens.encode(
                    text, add_special_tokens=tokenization.add_special_tokens
                ),
            )
            prompts.append(self._prompts.cut(encoded, tokenization, "left"))
        return prompts

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
            is_chat = self._engine.config.model.chat_audio is not None
            template = self._template(None, False) if is_chat else None
            self._transcriber = LocalTranscriber(self._engine, template, self._special_tokens)
        options = TranscriptionOptions(
            task=Task(task),
            language=parse_language(language, self._transcriber.speech),
            prompt=prompt,
            temperature=temperature,
            has_segments="segment" in timestamps,
            has_words="word" in timestamps,
        )
        is_one = isinstance(audio, str | bytes | Path | tuple)
        clips: Any = [audio] if is_one else audio
        return self._transcriber.transcribe(clips, options, self._numbers)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoraChoice | Sequence[LoraChoice] = None,
        use_tqdm: ProgressBar = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most probable continuations of every prompt, in the order of the prompts.

        Args:
            prompts: One prompt or a list of them.
            params: The parameters of the search.
            lora_request: The LoRA adapter to use, as for `generate`. The default is the base model.
            use_tqdm: Without effect.
            concurrency_limit: Without effect, because the scheduler limits how many prompts run at once.
            priority: As for `generate`.

        Raises:
            ParameterError: A prompt or parameter is invalid.
            EngineError: A step of the search failed.
        """
        params.verify(self._engine.config)
        wanted = [self._prompts.encode(prompt) for prompt in as_list(prompts)]
        loras = self._loras.find_each(lora_request, [bool(each.encoder_inputs) for each in wanted])
        ranks = each_priority(priority, len(wanted))
        return self._engine.run(self._beam_search(wanted, params, loras, ranks))

    async def _beam_search(
        self,
        prompts: list[EncodedPrompt],
        params: BeamSearchParams,
        loras: Sequence[LoraAdapter | None],
        priority: Sequence[int],
    ) -> list[BeamSearchOutput]:
        engine = self._engine
        search = BeamSearch(
            engine.client, params, engine.config.model.eos_token_ids, str(next(self._numbers))
        )
        results = self._requests.without_bad_words(SamplingParams(max_tokens=params.max_tokens))
        requests = [
            SequenceRequest(
                prompt.token_ids,
                results,
                priority=rank,
                lora=lora,
                encoder_inputs=list(prompt.encoder_inputs),
            )
            for prompt, lora, rank in zip(prompts, loras, priority, strict=True)
        ]
        group = await search.run(requests)
        outputs = zip(group.read_all(), search.logprobs, strict=True)
        return [
            BeamSearchOutput(
                [
                    BeamSearchSequence(
                        [*prompt.token_ids, *delta.token_ids],
                        delta.text,
                        logprob,
                        delta.finish_reason,
                    )
                    for delta, logprob in itertools.islice(outputs, len(results))
                ]
            )
            for prompt, results in zip(prompts, group.outputs_by_prompt(), strict=True)
        ]

    def get_tokenizer(self) -> ModelTokenizer:
        """Return the model's tokenizer, with the methods of transformers' tokenizers."""
        return ModelTokenizer(self._engine.tokenizer, self._template)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters in the model's generation config."""
        return self._requests.default_params()

    def close(self) -> None:
        """Stop the processes. Later calls do nothing."""
        atexit.unregister(self.close)
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enqueue(
        self,
        prompts: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoraChoice | Sequence[LoraChoice],
        priority: int | Sequence[int] | None,
    ) -> list[str]:
        work = self._requests.submit(prompts, sampling_params, lora_request, priority)
        groups = self._engine.run(work)
        self._queued += zip(groups, prompts, strict=True)
        return [group.request_id for group in groups]

    def _generate(
        self,
        prompts: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoraChoice | Sequence[LoraChoice],
        priority: int | Sequence[int] | None,
        use_tqdm: ProgressBar,
    ) -> list[RequestOutput]:
        async def work() -> list[RequestOutput]:
            groups = await self._requests.submit(prompts, sampling_params, lora_request, priority)
            return await self._collect(list(zip(groups, prompts, strict=True)), advance)

        with progress_bar(use_tqdm, len(prompts)) as advance:
            return self._engine.run(work())

    async def _collect(
        self,
        requests: Sequence[tuple[RequestGroup, EncodedPrompt]],
        advance: Callable[[int], object],
    ) -> list[RequestOutput]:
        """Return the outputs of requests. None of them runs afterwards."""
        tokenizer = self._engine.tokenizer
        try:
            outputs = []
            for group, prompt in requests:
                deltas = await group.result()
                writer = tokenizer if group.sequences[0].params.detokenize else None
                outputs.append(request_output(group, prompt.text, prompt.token_ids, deltas, writer))
                advance(1)
            return outputs
        finally:
            for group, _ in requests:
                group.abort()
