"""Place preprocessed images and videos in a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from ...protocol.config.images.details import SlicesProcessor
from ...protocol.config.images.processors import AnyImageProcessor
from ...protocol.config.images.tiles import MosaicProcessor
from ...protocol.config.videos import AnyVideoProcessor, VideoProcessor
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.errors import ConfigError, ParameterError, counted
from ..chat.messages import MEDIA_MARK
from ..tokenizer.tokenizer import Tokenizer
from .canvas import with_places
from .instructions import Instructions
from .media_reader import MAX_POSITION, PreparedImage, ReaderConfig, num_places


def _token(tokenizer: Tokenizer, token_id: int) -> str:
    token = tokenizer.id_to_token(token_id)
    if not token:
        raise ConfigError(
            f"the tokenizer has no token {token_id}, which represents images or videos (config.json)"
        )
    return token


def _texts_around_grid(tokenizer: Tokenizer, videos: VideoProcessor) -> tuple[str, str]:
    """Return the texts before and after each grid of a video."""
    if videos.start_token_id is None or videos.end_token_id is None:
        return videos.start, videos.end
    return _token(tokenizer, videos.start_token_id), _token(tokenizer, videos.end_token_id)


def _with_readers(inputs: list[EncoderInput]) -> list[EncoderInput]:
    """Return images with the tokens that read them. Consecutive images are read together, until the next image."""
    found: list[EncoderInput] = []
    until, after = MAX_POSITION, -1
    for index, item in reversed(list(enumerate(inputs))):
        if item.position + 1 != after and after >= 0:
            until = after
        after = item.position
        follows = index > 0 and inputs[index - 1].position + 1 == item.position
        found.insert(0, msgspec.structs.replace(item, read_until=until, follows=follows))
    return found


def _with_sounds(
    images: Sequence[PreparedImage], placed: Iterator[EncoderInput], num_tokens: int
) -> list[EncoderInput]:
    """Return the placed inputs of images and videos with those of the videos' sounds, in the order of the prompt.

    Raises:
        ParameterError: The tokens of a video are not at the expected positions.
    """
    found: list[EncoderInput] = []
    for image in images:
        own = [next(placed) for _ in image.inputs]
        if image.sounds:
            starts = {
                item.position - each.position for item, each in zip(own, image.inputs, strict=True)
            }
            if len(starts) > 1:
                raise ParameterError(
                    "messages", "have text that the tokenizer joins with a video's token"
                )
            [start] = starts
            # The mark after a video, whose position is among the places, may be missing.
            most = 12 * (num_tokens - own[0].position + 1)
            own[0] = msgspec.structs.replace(own[0], places=own[0].places[:most])
            own += [
                msgspec.structs.replace(item, position=start + item.position)
                for item in image.sounds
            ]
            own.sort(key=lambda item: item.position)
        found += own
    return found


class PromptImages:
    """Places images and videos in the prompts of one model. It is thread-safe.

    Attributes:
        reader_config: The image and video processors for these prompts.
    """

    def __init__(
        self,
        config: AnyImageProcessor,
        tokenizer: Tokenizer,
        videos: AnyVideoProcessor | None = None,
        max_outputs: int = 1 << 30,
    ) -> None:
        self._config = config
        self._videos = videos
        token = _token(tokenizer, config.token_id)
        self._mark = config.mark or token
        start = config.after_images or config.prompt_start
        self._start_id = tokenizer.token_to_id(start) if start else None
        self._line_id: int | None = None
        if config.ends_line:
            self._line_id = tokenizer.encode("\n", add_special_tokens=False)[0]
        patterns = [re.escape(self._mark).replace(r"\{\}", r"\d+"), MEDIA_MARK]
        if config.start and self._mark == f"{config.start}{token}{config.end.rstrip()}":
            # Ling 3 also reads the token without the texts around it.
            patterns.append(re.escape(token))
        self._token_ids = [config.token_id]
        self._token_ids += config.mark_ids
        self._video_token = token_of_video = ""
        around = "", ""
        if videos is not None:
            self._token_ids.append(videos.token_id)
            token_of_video = _token(tokenizer, videos.token_id)
            self._video_token = token_of_video
            if videos.mark_id is not None:
                self._video_token = _token(tokenizer, videos.mark_id)
            self._video_token = videos.mark or self._video_token
            patterns.insert(0, re.escape(self._video_token))
            if isinstance(videos, VideoProcessor):
                around = _texts_around_grid(tokenizer, videos)
                if around[0]:
                    # Each grid of a video has these tokens before and after it.
                    patterns.insert(0, re.escape(self._video_token.join(around)))
        self._place = re.compile("|".join(patterns))
        self._canvas_marks: set[int] = set()
        if isinstance(config, SlicesProcessor) and config.newline_id is not None:
            texts = (config.start, config.end, config.slice_start, config.slice_end)
            ids = (tokenizer.token_to_id(text) for text in texts if text)
            self._canvas_marks = {config.newline_id, *(id_ for id_ in ids if id_ is not None)}
        self._instructions: Instructions | None = None
        if config.instruction_tokenizer:
            self._instructions = Instructions(
                config.instruction_tokenizer, config.max_instruction_tokens
            )
        self.reader_config = ReaderConfig(
            config, videos, token, token_of_video, around, max_outputs
        )

    def place_alone(
        self, text: str, images: Sequence[PreparedImage]
    ) -> tuple[list[int], list[EncoderInput]]:
        """Return the tokens and the encoder input of a prompt that is one image.

        Raises:
            ParameterError: There are several images, or a text beside one.
        """
        inputs = [item for image in images for item in image.inputs]
        if len(inputs) != 1 or self._place.sub("", text).strip():
            raise ParameterError(
                "messages",
                "must have one image or a text, because this model embeds both separately",
            )
        return [self._config.token_id], [msgspec.structs.replace(inputs[0], position=0)]

    def place_before(
        self,
        text: str,
        images: Sequence[PreparedImage],
        encode: Callable[[str], tuple[str, Sequence[int]]],
    ) -> tuple[str, list[int], list[EncoderInput]]:
        """Return the text, tokens and encoder inputs of a prompt whose images precede what `encode` returns.

        Raises:
            ParameterError: The text is too long for the encoder.
        """
        text, token_ids = encode(self._place.sub("", text))
        inputs = [item for image in images for item in image.inputs]
        placed = [self._config.token_id] * sum(map(num_places, inputs))
        inputs = self.inputs(placed, images)
        if self._instructions is not None:
            inputs = self._instructions.add_text(inputs, text)
        return "".join((*(image.text for image in images), text)), [*placed, *token_ids], inputs

    def in_order(self, text: str, images: Sequence[PreparedImage]) -> Sequence[PreparedImage]:
        """Return images and videos in the order of their places in a prompt.

        Raises:
            ParameterError: The prompt has more or fewer places than there are images or videos.
        """
        places = [match[0] for match in self._place.finditer(text)]
        if len(places) != len(images):
            raise ParameterError(
                "messages",
                f"have {counted(len(images), 'image')}, but the prompt has {counted(len(places), 'image token')}; "
                f"remove {self._mark!r} from texts, or use another chat template",
            )
        if self._videos is None or MEDIA_MARK in places:
            return images
        are_videos = [self._video_token in place for place in places]
        num_videos = sum(image.is_video for image in images)
        if sum(are_videos) != num_videos:
            raise ParameterError(
                "messages",
                f"have {num_videos} videos, but the prompt has {sum(are_videos)} video tokens; "
                f"remove {self._video_token!r} from texts, or use another chat template",
            )
        videos = iter([image for image in images if image.is_video])
        others = iter([image for image in images if not image.is_video])
        return [next(videos if is_video else others) for is_video in are_videos]

    def expand(self, text: str, images: Sequence[PreparedImage]) -> str:
        """Return the prompt with one token for each embedding. The images must be in the order of `in_order`."""
        config = self._config
        texts = [image.text for image in images]
        if config.number_start:
            texts = [
                f"{config.number_start}{number}{config.number_end}{each}"
                for number, each in enumerate(texts, config.first_number)
            ]
        if texts:
            texts[-1] += config.after_images
            text += config.prompt_end
        if texts and config.prompt_start:
            text = self._place.sub("", text).removeprefix(config.prompt_start)
            text = "".join((config.prompt_start, *texts, text))
            texts = []
        each = iter(texts)
        text = self._place.sub(lambda _: next(each), text) if texts else text
        if joint := config.joint:
            text = re.sub(
                rf"{re.escape(joint)}(?=[^\s<])", f"{joint} ", text.replace(2 * joint, joint)
            )
        return text

    def complete(
        self, token_ids: Sequence[int], images: Sequence[PreparedImage] = ()
    ) -> Sequence[int]:
        """Return the tokens of a prompt that was made by `expand`, with line feeds after tiles that have them.

        The first token is left out if the format puts it elsewhere, or if the prompt has it twice.
        """
        if self._line_id is not None:
            completed = np.array(token_ids)
            places = np.flatnonzero(completed == self._config.token_id)
            counts = [item.num_tokens + 1 for image in images for item in image.inputs]
            ends = np.cumsum(counts) - 1
            if len(places) == sum(counts):
                completed[places[ends]] = self._line_id
            found: list[int] = completed.tolist()
            return found
        starts = self._start_id is not None and token_ids[:1] == [self._start_id]
        if self._config.prompt_start:
            starts = starts and token_ids[1:2] == [self._start_id]
        return token_ids[1:] if starts else token_ids

    def inputs(
        self, token_ids: Sequence[int], images: Sequence[PreparedImage]
    ) -> list[EncoderInput]:
        """Return the encoder inputs of a prompt that was made by `expand`.

        Raises:
            ParameterError: The tokens of an image are not at the expected positions.
        """
        positions = np.flatnonzero(np.isin(np.asarray(token_ids), self._token_ids))
        num_tokens = len(token_ids)
        inputs = [item for image in images for item in image.inputs]
        ends = list(accumulate(map(num_places, inputs)))
        if [len(positions)] == ends[-1:]:
            starts = [
                positions[end - num_places(item)] for item, end in zip(inputs, ends, strict=True)
            ]
            lasts = positions[np.asarray(ends) - 1]
            expected = [
                start + item.num_tokens - 1 for start, item in zip(starts, inputs, strict=True)
            ]
            if (lasts == expected).all():
                placed = iter(
                    msgspec.structs.replace(item, position=int(start))
                    for item, start in zip(inputs, starts, strict=True)
                )
                if isinstance(self._config, MosaicProcessor):
                    return _with_readers(list(placed))
                if any(image.sounds for image in images):
                    return _with_sounds(images, placed, num_tokens)
                if not self._canvas_marks:
                    return list(placed)
                groups = [[next(placed) for _ in image.inputs] for image in images]
                each = (with_places(token_ids, group, self._canvas_marks) for group in groups)
                return [item for group in each for item in group]
        raise ParameterError("messages", "have text that the tokenizer joins with an image's token")
