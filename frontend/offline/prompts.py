"""Encode the prompts that are passed to `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from ...protocol.config.model import SourceTextConfig
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.errors import ParameterError
from ..client.encoder_inputs import Embeddings, answer_start, encoder_inputs_of, text_source
from ..client.text_changes import TextChanges
from ..media.find_media import find_chat_media
from ..media.sources.media_options import MediaOptions, parse_media_options
from .local_engine import LocalEngine
from .named_media import NamedMedia
from .params import Tokenization


class EncodedPrompt(NamedTuple):
    """A prompt as text (None if it was given as token IDs) and as token IDs, with its images or audio.

    Tokens from index `second_segment` on have token type 1; 0 means that none has. Tokens attend only to the first
    `num_visible`, if that is not 0, and only those that `keeps_T` marks have results.
    """

    text: str | None
    token_ids: list[int]
    encoder_inputs: Sequence[EncoderInput] = ()
    second_segment: int = 0
    num_visible: int = 0
    keeps_T: npt.NDArray[np.bool_] | None = None


class TextPrompt(TypedDict):
    """A mapping with a prompt as text. It may have the other names that `Prompt` lists."""

    prompt: str


class TokensPrompt(TypedDict):
    """A mapping with a prompt as token IDs. It may have the other names that `Prompt` lists."""

    prompt_token_ids: list[int]


Prompt: TypeAlias = str | list[int] | Mapping[str, Any] | EncodedPrompt
"""A text, token IDs, a mapping with `prompt`, `prompt_token_ids` or `prompt_embeds`, or a result of `preprocess_chat`.

A model with an encoder for texts reads the prompt with its encoder. A mapping for it may have `encoder_prompt` instead,
and `decoder_prompt`, which is the beginning of the answer, or None: each a text, token IDs or a mapping. Images may be
beside `encoder_prompt` or in it.

`prompt_embeds` is a float array [tokens, hidden size].

A mapping with `prompt` may have `multi_modal_data`: `{"image": image}` with a Pillow image, `{"video": frames}` with an
array or a list of Pillow images, or `{"audio": (samples, rate)}` with an array. Each value may also be a list of these.
The prompt's text marks their places with the model's tokens. `multi_modal_uuids` names them, as in vLLM:
`{"image": "name"}`, or a list of names. In a later prompt, None in place of the data refers to the named one.
`mm_processor_kwargs` may have `use_audio_in_video`: then files of videos are read with their sound, and the first audio
clips are the sound of videos that are given as frames.
"""

PromptType: TypeAlias = Prompt
"""vLLM's name of `Prompt`."""

PLAIN: Final = Tokenization()
_MEDIA_FIELDS: Final = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")


class PromptEncoder:
    """Encodes prompts for the model of an engine."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._text_changes = TextChanges.find(engine.config.model.pooler, engine.tokenizer)
        self._media = find_chat_media(engine.config, engine.tokenizer, engine.client.executor)
        self._named_media = NamedMedia()
        if self._media is not None:
            engine.close_together(self._media.close)

    def take_media(
        self, conversation: Sequence[Any], processor: Mapping[str, Any] | None = None
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return a conversation with images or audio replaced by marks, and a list of the images or audio.

        `processor` are the fields of vLLM's `mm_processor_kwargs`.
        """
        options = parse_media_options(processor)
        if self._media is None:
            return conversation, ()
        conversation = self._named_media.fill_in(conversation)
        return self._engine.run(self._media.take(conversation, 0, options))

    def forget_named_media(self) -> None:
        """Drop the media that later prompts could refer to by name."""
        self._named_media.clear()

    def tokenization(self, given: Mapping[str, Any] | None) -> Tokenization:
        """Return vLLM's `tokenization_kwargs`, checked. Raises ParameterError if they are invalid."""
        return Tokenization.parse(given, self._engine.config.model.max_model_len)

    def encode_pooled(
        self,
        prompt: Prompt,
        instruction: str = "",
        role: str = "",
        tokenization: Tokenization = PLAIN,
    ) -> EncodedPrompt:
        """Return an encoded prompt that is pooled. `instruction` is put before a text.

        `role` is the name of the model's prompt for it.

        Raises:
            ParameterError: The model has an encoder and a decoder, but no classification head.
        """
        model = self._engine.config.model
        if (source := model.source_text) is not None:
            if model.classifier is None:
                raise ParameterError(
                    "prompts",
                    "of models with an encoder and a decoder are supported only by generate and beam_search",
                )
            text, token_ids = self._encode_part(prompt, "prompt", source.vocab_size, is_source=True)
            encoded = self.cut(EncodedPrompt(text, token_ids.tolist()), tokenization, "right")
            _verify_source(np.array(encoded.token_ids, np.int32), "prompt", source)
            return encoded
        changes = self._text_changes
        if changes is None:
            return self.encode(prompt, instruction, "", tokenization, "right")
        around = changes.prefix_of(role) + instruction, changes.suffix_of(role)
        encoded = self.encode(prompt, *around, tokenization, "right")
        if encoded.text is None or encoded.encoder_inputs:
            return encoded
        token_ids, num_visible = changes.add_tokens(role, encoded.text, encoded.token_ids)
        keeps_T = changes.keeps(role, token_ids)
        return EncodedPrompt(
            encoded.text, token_ids.tolist(), num_visible=num_visible, keeps_T=keeps_T
        )

    def encode(
        self,
        prompt: Prompt,
        instruction: str = "",
        suffix: str = "",
        tokenization: Tokenization = PLAIN,
        side: str = "left",
    ) -> EncodedPrompt:
        """Return an encoded prompt. `instruction` is put before a text, and `suffix` after it.

        A prompt that is too long for the `tokenization` is cut, by default at `side`.
        """
        if isinstance(prompt, EncodedPrompt):
            return self.cut(prompt, tokenization, side)
        given: Any = prompt
        media: list[Any] = []
        if isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            return self._encode_embeddings(prompt["prompt_embeds"])
        has_media = isinstance(prompt, Mapping) and _has_media(prompt)
        if (source := self._engine.config.model.source_text) is not None and not has_media:
            return self._encode_source(prompt, source)
        if isinstance(prompt, Mapping) and "encoder_prompt" in prompt:
            if source is None:
                raise ParameterError("encoder_prompt", "needs a model with an encoder for texts")
            return self._encode_source_with_media(prompt, source)
        if isinstance(prompt, Mapping):
            given = _content(prompt)
            names = prompt.get("multi_modal_uuids") or {}
            options = parse_media_options(prompt.get("mm_processor_kwargs"))
            media = self._prepare_media(prompt.get("multi_modal_data") or {}, names, given, options)
        if isinstance(given, str):
            tokenizer = self._engine.tokenizer
            adds = tokenization.add_special_tokens
            encoded = self.encode_text(
                instruction + given + suffix,
                media,
                lambda text: (text, tokenizer.encode(text, adds)),
            )
        else:
            encoded = EncodedPrompt(None, list(given))
        return self.cut(encoded, tokenization, side)

    def cut(self, prompt: EncodedPrompt, tokenization: Tokenization, side: str) -> EncodedPrompt:
        """Return a prompt that is not longer than the `tokenization` allows.

        Raises:
            ParameterError: The prompt is too long, and has images or audio.
        """
        text, token_ids, inputs = prompt[:3]
        keep = tokenization.keep
        if keep is None or len(token_ids) <= keep:
            return prompt
        if inputs:
            raise ParameterError(
                "tokenization_kwargs",
                f"cannot cut a prompt with images or audio from {len(token_ids)} to {keep} tokens",
            )
        bare: Sequence[int] = token_ids
        if text is not None:
            bare = self._engine.tokenizer.encode(text, add_special_tokens=False)
        return prompt._replace(token_ids=tokenization.cut(token_ids, bare, side))

    def _encode_source(self, prompt: Prompt, config: SourceTextConfig) -> EncodedPrompt:
        """Return the start of the answer, with the source as an encoder input."""
        name, source, start = "prompt", prompt, None
        if isinstance(prompt, Mapping) and "encoder_prompt" in prompt:
            name, start = "encoder_prompt", prompt.get("decoder_prompt")
            source = prompt[name]
        sizes = config.vocab_size, self._engine.config.model.vocab_size
        text, token_ids = self._encode_part(source, name, sizes[0], is_source=True)
        _verify_source(token_ids, name, config)
        if start is not None:
            name = "decoder_prompt"
            start = self._encode_part(start, name, sizes[1], is_source=False)[1]
        return EncodedPrompt(text, answer_start(config, start).tolist(), [text_source(token_ids)])

    def _encode_source_with_media(
        self, prompt: Mapping[str, Any], config: SourceTextConfig
    ) -> EncodedPrompt:
        """Return the start of the answer to an `encoder_prompt`, which has images itself or beside it."""
        source, start = prompt["encoder_prompt"], prompt.get("decoder_prompt")
        if not isinstance(source, Mapping):
            source = {"prompt" if isinstance(source, str) else "prompt_token_ids": source}
        beside = {name: prompt[name] for name in _MEDIA_FIELDS if name in prompt}
        encoded = self.encode({**beside, **source})
        if start is None:
            return encoded
        size = self._engine.config.model.vocab_size
        start = self._encode_part(start, "decoder_prompt", size, is_source=False)[1]
        return encoded._replace(token_ids=answer_start(config, start).tolist())

    def _encode_part(
        self, given: Any, name: str, size: int, *, is_source: bool
    ) -> tuple[str | None, npt.NDArray[np.int32]]:
        """Return the text of a prompt (None for tokens), and its tokens, which must be below `size`."""
        if isinstance(given, Mapping):
            given = _content(given)
        if isinstance(given, str):
            tokenizer = self._engine.tokenizer
            token_ids = tokenizer.encode(given) if is_source else tokenizer.encode_output(given)
            return given, np.array(token_ids, np.int32)
        if bad := [token for token in given if not 0 <= token < size]:
            raise ParameterError(
                name, f"has the token {bad[0]}, outside the vocabulary [0, {size})"
            )
        return None, np.array(given, np.int32)

    def _encode_embeddings(self, given: Any) -> EncodedPrompt:
        config = self._engine.config
        model = config.model
        if not model.enable_prompt_embeds:
            raise ParameterError("prompt_embeds", "needs LLM(..., enable_prompt_embeds=True)")
        try:
            array = np.asarray(given)
        except (TypeError, ValueError) as error:
            raise ParameterError("prompt_embeds", f"must be an array: {error}") from None
        if array.dtype not in (np.float16, np.float32, np.float64):
            raise ParameterError("prompt_embeds", f"must contain floats, got {array.dtype}")
        if array.ndim != 2 or array.shape[1] != model.hidden_size or not len(array):
            raise ParameterError(
                "prompt_embeds",
                f"must have the shape [tokens, {model.hidden_size}], got {list(array.shape)}",
            )
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        embeddings = Embeddings(array.dtype.name, array.shape, little.tobytes())
        if not embeddings.are_finite():
            raise ParameterError("prompt_embeds", "has numbers that are not finite")
        return EncodedPrompt(None, [0] * len(array), encoder_inputs_of(embeddings, config))

    def _prepare_media(
        self,
        data: Mapping[str, Any],
        names: Mapping[str, Any],
        prompt: Any,
        options: MediaOptions,
    ) -> list[Any]:
        """Return the preprocessed images, videos or audio of a prompt."""
        if not data:
            return []
        model = self._engine.config.model
        known = set() if model.chat_audio is None else {"audio"}
        if model.images is not None:
            known.add("image")
        if model.videos is not None:
            known.add("video")
        if not data.keys() <= known or self._media is None or not isinstance(prompt, str):
            raise ParameterError(
                "multi_modal_data",
                f"must be images or audio for a text prompt and a model that reads them, got {sorted(data)}",
            )
        wanted: list[Any] = []
        for kind, given in data.items():
            where = "multi_modal_data.video" if kind == "video" else "multi_modal_data"
            # A list of frames is one video. A list of several videos contains lists or arrays.
            is_list = isinstance(given, list)
            if kind == "video" and is_list:
                is_list = all(
                    each is None or isinstance(each, list) or hasattr(each, "shape")
                    for each in given
                )
            found = self._named_media.find_all(kind, given if is_list else [given], names.get(kind))
            wanted += [self._media.wrap(each, where) for each in found]
        return self._engine.run(self._media.prepare(wanted, options))

    def encode_text(
        self,
        text: str,
        media: Sequence[Any],
        encode: Callable[[str], tuple[str, Sequence[int]]],
    ) -> EncodedPrompt:
        """Return an encoded prompt whose text has a place for each image or audio clip.

        If the model has an encoder for texts, the text with its images is the source of the answer.

        Raises:
            ParameterError: The source is empty, or longer than the model reads.
        """
        inputs: list[EncoderInput] = []
        if self._media is None:
            text, token_ids = encode(text)
        else:
            text, token_ids, inputs = self._media.encode(text, media, encode)
        if (config := self._engine.config.model.source_text) is None:
            return EncodedPrompt(text, list(token_ids), inputs)
        _verify_source(token_ids, "prompt", config)
        source = text_source(np.array(token_ids, np.int32), inputs)
        return EncodedPrompt(text, answer_start(config, None).tolist(), [source])


def _verify_source(token_ids: Sized, name: str, config: SourceTextConfig) -> None:
    if not 0 < len(token_ids) <= config.max_tokens:
        raise ParameterError(
            name, f"must have 1 to {config.max_tokens} tokens, got {len(token_ids)}"
        )


def _has_media(prompt: Mapping[str, Any]) -> bool:
    source = prompt.get("encoder_prompt")
    inner = source.get("multi_modal_data") if isinstance(source, Mapping) else None
    return bool(prompt.get("multi_modal_data") or inner)


def _content(prompt: Mapping[str, Any]) -> str | list[int]:
    """Return the text or the token IDs of a mapping."""
    content: str | list[int] = prompt[
        "prompt_token_ids" if "prompt_token_ids" in prompt else "prompt"
    ]
    return content


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list."""
    is_one = isinstance(prompts, EncodedPrompt) or not isinstance(prompts, list | tuple)
    several = not is_one and not (prompts and isinstance(prompts[0], int))  # type: ignore[index]
    return list(prompts) if several else [prompts]  # type: ignore[arg-type, list-item]
