"""Take the images and videos out of a conversation, and preprocess them for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...protocol.config import EngineConfig
from ...protocol.config.frontend import MAX_VIDEO_FPS, MAX_VIDEO_FRAMES
from ...protocol.config.images.sized import PatchesProcessor
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.errors import ParameterError
from ..chat.messages import IMAGE_PART, MEDIA_MARK, VIDEO_PART, TemplatePart, fields_for_template
from ..client.executor import ThreadExecutor
from ..http.shown_values import echo
from ..tokenizer.tokenizer import Tokenizer
from .chat_media import ChatMedia
from .decoding.processes import MediaProcesses
from .embeddings import check_embeddings, read_embeddings, read_grid
from .frame_sampling import DEFAULT_SAMPLING, Sampling
from .media_reader import MediaReader, PreparedImage
from .message_parts import replace_parts, verify_count
from .prompt_images import PromptImages
from .sources.media_options import DEFAULT_OPTIONS, MediaOptions
from .sources.processor_fields import LIMITS_OF_PARTS, ProcessorField, take_fields, verify_fields

_EMBEDDINGS: Final = "image_embeds"
_KINDS: Final = ("image_url", "input_image", "image_pil", "image", _EMBEDDINGS)
_MAX_HEADER: Final = 4096
"""Maximum number of characters that are drawn on an image."""

_VIDEO_KINDS: Final = ("video_url", "input_video", "video")


class ChatImage(NamedTuple):
    """An image of a conversation: a URL, or a Pillow image from a caller in this process.

    `fields` replace settings of the model's processor. `header` is a text that is drawn above the image.
    """

    source: str | Image.Image
    where: str
    fields: tuple[ProcessorField, ...] = ()
    header: str = ""


class EmbeddedImage(NamedTuple):
    """An image that is given as its embeddings: a file in base64, or an array from a caller in this process.

    `fields` may contain the grid of the embeddings.
    """

    source: str | NDArray[Any]
    where: str
    fields: Mapping[str, Any] = MappingProxyType({})


class ChatVideo(NamedTuple):
    """A video of a conversation: a URL, the bytes of a file or the frames, and the choice of frames to read.

    `fields` replace settings of the model's processor.
    """

    source: str | bytes | list[str | Image.Image]
    where: str
    sampling: Sampling = Sampling()
    fields: tuple[ProcessorField, ...] = ()


ChatItem: TypeAlias = ChatImage | EmbeddedImage | ChatVideo


class MediaLimits(NamedTuple):
    """The maximum numbers of images and videos in a prompt; None for videos if the model reads none."""

    max_images: int
    max_videos: int | None


def take_media(messages: Sequence[Any], limits: MediaLimits) -> tuple[list[Any], list[ChatItem]]:
    """Return a copy of the messages with images and videos replaced by marks, and a list of the images and videos.

    The marks are `VIDEO_PART`, and `IMAGE_PART` with the fields for the template.

    Raises:
        ParameterError: A part is invalid, or there are too many images or videos.
    """
    media: list[ChatItem] = []
    taken = replace_parts(messages, lambda part, where: _replace_media(part, where, media, limits))
    num_videos = sum(isinstance(item, ChatVideo) for item in media)
    verify_count("images", len(media) - num_videos, limits.max_images)
    verify_count("videos", num_videos, limits.max_videos or 0)
    return taken, media


def _text_in(messages: Sequence[Any]) -> str:
    """Return the text of a conversation, which is drawn on its image.

    Raises:
        ParameterError: There is no text, or too much.
    """
    texts: list[str] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else [content]
        found = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
        texts += (text for text in found if isinstance(text, str))
    header = "".join(texts).strip()
    if not 0 < len(header) <= _MAX_HEADER:
        raise ParameterError(
            "messages",
            f"must have a text of 1 to {_MAX_HEADER} characters, which is drawn on the image; got {len(header)}",
        )
    return header


def _kind(part: Any) -> str:
    """Return the type of a part that is an image or a video, otherwise ""."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) and kind in (*_KINDS, *_VIDEO_KINDS) else ""


def _replace_media(part: Any, where: str, media: list[ChatItem], limits: MediaLimits) -> Any:
    """Append the image or video of a part to `media` and return its mark; return any other part unchanged."""
    kind = _kind(part)
    if not kind:
        return part
    is_video = kind in _VIDEO_KINDS
    if is_video and limits.max_videos is None:
        raise ParameterError(
            f"{where}.type",
            f"must be text or an image, because this model does not support videos; got {echo(kind)}",
        )
    value = part.get(kind, part.get("video_url" if is_video else "image_url"))
    where = f"{where}.{kind}"
    fps, num_frames = part.get("fps"), part.get("num_frames")
    if kind == _EMBEDDINGS:
        media.append(make_embedded(value, where))
        return IMAGE_PART
    fields = _fields_of(part, where)
    if isinstance(value, Mapping):
        fields += _fields_of(value, where)
        fps, num_frames = value.get("fps", fps), value.get("num_frames", num_frames)
        value, where = value.get("url"), f"{where}.url"
    if is_video:
        media.append(make_video(value, where, fps, num_frames)._replace(fields=fields))
        return VIDEO_PART
    if not isinstance(value, str | Image.Image) or not value:
        raise ParameterError(where, f"must be the URL of an image, got {echo(value)}")
    media.append(ChatImage(value, where, fields))
    own = fields_for_template(part)
    return TemplatePart(IMAGE_PART | own) if own else IMAGE_PART


def _fields_of(part: Mapping[str, Any], where: str) -> tuple[ProcessorField, ...]:
    """Return the limits of an image or a video beside its URL, as in the APIs of Qwen and SGLang."""
    return take_fields({name: part[name] for name in LIMITS_OF_PARTS if name in part}, where)


def make_embedded(value: Any, where: str) -> EmbeddedImage:
    """Return an image from its embeddings: a file in base64, an array, or an object with an array and its grid.

    Raises:
        ParameterError: The value is none of these.
    """
    fields: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        fields, value = value, value.get(_EMBEDDINGS)
        where = f"{where}.{_EMBEDDINGS}"
    if hasattr(value, "__array__"):
        value = np.asarray(value)  # It may be a tensor of torch.
    if not isinstance(value, str | np.ndarray):
        raise ParameterError(where, f"must be a base64 file, got {echo(value)}")
    return EmbeddedImage(value, where, fields)


def make_video(value: Any, where: str, fps: Any = None, num_frames: Any = None) -> ChatVideo:
    """Return a video.

    Args:
        value: A URL, the bytes of a file, a list of URLs or Pillow's images, or an array uint8 [frames, height, width,
            3].
        where: The name of the field in errors.
        fps: The number of frames per second, or None.
        num_frames: The number of frames to read from a file, or None.

    Raises:
        ParameterError: The value is not a video, or `fps` or `num_frames` is invalid.
    """
    parent = where.rpartition(".")[0]
    if fps is not None and not (type(fps) in (int, float) and 0 < fps <= MAX_VIDEO_FPS):
        raise ParameterError(
            f"{parent}.fps",
            f"must be above 0 and at most {MAX_VIDEO_FPS:g}, got {echo(fps)}",
        )
    if num_frames is not None and not (
        type(num_frames) is int and 0 < num_frames <= MAX_VIDEO_FRAMES
    ):
        raise ParameterError(
            f"{parent}.num_frames", f"must be 1 to {MAX_VIDEO_FRAMES}, got {echo(num_frames)}"
        )
    if fps is not None and num_frames is not None:
        raise ParameterError(f"{parent}.num_frames", "must not be given with fps; send one of them")
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 4 or value.shape[-1] != 3:
            raise ParameterError(
                where,
                f"must be uint8 [frames, height, width, 3], got {value.dtype} {list(value.shape)}",
            )
        value = [Image.fromarray(frame) for frame in value]
    is_list = isinstance(value, list) and all(isinstance(f, str | Image.Image) for f in value)
    if not value or not (is_list or isinstance(value, str | bytes)):
        raise ParameterError(
            where, f"must be the URL of a video or a list of its frames, got {echo(value)}"
        )
    return ChatVideo(value, where, Sampling(fps, num_frames))


class ChatImages(ChatMedia):
    """Takes images and videos out of conversations and preprocesses them for the model."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, executor: ThreadExecutor
    ) -> None:
        assert config.model.images is not None, "the model reads no images"
        self._videos = config.model.videos
        self._places = PromptImages(
            config.model.images, tokenizer, self._videos, config.model.max_model_len
        )
        self._reader = MediaReader(self._places.reader_config)
        processes = MediaProcesses(self._places.reader_config)
        super().__init__(config, executor, processes, ("images", "fewer or smaller images"))
        self._limits = MediaLimits(
            config.frontend.max_images,
            None if self._videos is None else config.frontend.max_videos,
        )
        video = config.frontend.media_io_kwargs.video
        num_frames = MAX_VIDEO_FRAMES if video.num_frames == -1 else video.num_frames
        self._sampling = Sampling(video.fps or None, None if video.fps else num_frames or None)
        self._processors = config.model.images, self._videos
        self._reads_embeddings = config.frontend.enable_mm_embeds
        self._size = config.model.images.output_size
        self._stands_alone = config.model.images.stands_alone
        self._precedes_prompt = config.model.images.precedes_prompt
        images = config.model.images
        self._draws_text = isinstance(images, PatchesProcessor) and images.font != ""

    def _take(
        self, messages: Sequence[Any], options: MediaOptions
    ) -> tuple[list[Any], list[ChatItem]]:
        taken, media = take_media(messages, self._limits)
        if media and self._draws_text:
            header = _text_in(messages)
            media = [x._replace(header=header) if isinstance(x, ChatImage) else x for x in media]
        return taken, media

    async def prepare(
        self, found: Sequence[ChatItem], options: MediaOptions = DEFAULT_OPTIONS
    ) -> list[Any]:
        """Return preprocessed images and videos.

        Raises:
            ParameterError: One of them cannot be read, they do not fit into the context, or a request wants the sound
                of videos.
        """
        if options.reads_sound and any(isinstance(item, ChatVideo) for item in found):
            raise ParameterError(
                "mm_processor_kwargs.use_audio_in_video",
                "must be false, because this model reads no audio; got true",
            )
        return await super().prepare(self.with_options(found, options))

    def with_options(self, found: Sequence[Any], options: MediaOptions) -> list[Any]:
        """Return images and videos with the choices of a request, unless they have their own.

        Raises:
            ParameterError: The model's processor lacks a field.
        """
        if found:
            verify_fields((*options.images, *options.videos), *self._processors)
        chosen = Sampling(options.fps, options.num_frames)
        changed: list[Any] = []
        for item in found:
            if isinstance(item, ChatVideo):
                sampling = item.sampling if item.sampling != DEFAULT_SAMPLING else chosen
                if None not in sampling:
                    raise ParameterError(
                        "mm_processor_kwargs.num_frames",
                        "must not be given with fps; send one of them",
                    )
                item = item._replace(sampling=sampling, fields=(*options.videos, *item.fields))
            elif isinstance(item, ChatImage):
                item = item._replace(fields=(*options.images, *item.fields))
            changed.append(item)
        return changed

    def wrap(self, given: Any, where: str) -> ChatItem:
        """Return an image or a video that a caller in this process passed, in the form that `prepare` takes.

        Raises:
            ParameterError: The value is neither.
        """
        if where.endswith(".video"):
            return make_video(given, where)
        if isinstance(given, Image.Image | str):
            return ChatImage(given, where)
        if isinstance(given, Mapping) or hasattr(given, "__array__"):
            return make_embedded(given, where)
        raise ParameterError(where, f"must have images or arrays, got {echo(given)}")

    def encode(
        self,
        text: str,
        images: Sequence[PreparedImage],
        encode: Callable[[str], tuple[str, Sequence[int]]],
    ) -> tuple[str, Sequence[int], list[EncoderInput]]:
        """Return a prompt with the tokens of the images inserted, its token ids, and the encoder inputs."""
        if not images:
            return *encode(text), []
        if self._stands_alone:
            return "", *self._places.place_alone(text, images)
        if self._draws_text:
            # The decoder does not read the text.
            text = MEDIA_MARK * len(images)
        images = self._places.in_order(text, images)
        if self._precedes_prompt:
            return self._places.place_before(text, images, encode)
        text, token_ids = encode(self._places.expand(text, images))
        token_ids = self._places.complete(token_ids, images)
        return text, token_ids, self._places.inputs(token_ids, images)

    async def _prepare_one(self, image: ChatItem, found: Sequence[ChatItem]) -> PreparedImage:
        source: Any = image.source
        where = image.where
        if isinstance(image, EmbeddedImage):
            place = partial(self._place_embeddings, fields=image.fields)
            return await self._executor.in_thread(place, source, where)
        source = await self.urls.fetch(source, where)
        # Pillow's images come from a caller in this process, who has already decoded them.
        is_decoded = isinstance(source, Image.Image) or (
            isinstance(source, list) and any(isinstance(part, Image.Image) for part in source)
        )
        reader = self._reader if is_decoded else self._processes
        if isinstance(image, ChatVideo):
            sampling = image.sampling
            if sampling == DEFAULT_SAMPLING and not isinstance(source, list):
                sampling = self._sampling
            return await self._executor.in_thread(
                reader.read_video, source, sampling, where, image.fields
            )
        num_images = sum(not isinstance(item, ChatVideo) for item in found)
        return await self._executor.in_thread(
            reader.read_image, source, where, num_images, image.fields, image.header
        )

    def _place_embeddings(
        self, source: str | NDArray[Any], where: str, fields: Mapping[str, Any]
    ) -> PreparedImage:
        if not self._reads_embeddings:
            raise ParameterError(
                where, "is not accepted by this server, which runs without --enable-mm-embeds"
            )
        values = read_embeddings(source, where) if isinstance(source, str) else source
        checked = check_embeddings(values, where, self._size)
        grid = read_grid(fields, where.removesuffix(f".{_EMBEDDINGS}"), len(checked))
        try:
            return self._reader.place_embeddings(checked, grid)
        except ValueError as error:
            raise ParameterError(where, f"cannot be read by this model: {error}") from None
