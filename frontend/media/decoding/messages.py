"""Messages between a frontend and the processes that decode media for it."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.isolation.messages import Exited
from ..frame_sampling import Sampling
from ..media_reader import ReaderConfig
from ..sources.processor_fields import ProcessorField
from .limits import DecoderLimits


class Setup(msgspec.Struct):
    """The settings with which the processes are started. `reader` is None for a model that reads only audio clips."""

    reader: ReaderConfig | None
    limits: DecoderLimits


class Source(msgspec.Struct, array_like=True):
    """The division of a request's content into parts, given by their sizes in bytes.

    `is_text` is true if the parts are data URLs, `is_list` if they are the frames of one video.
    """

    sizes: list[int]
    is_text: bool = False
    is_list: bool = False


class ReadImage(msgspec.Struct, tag=1, array_like=True):
    """A request to read one of `num_images` images of a prompt. The reply is Prepared or Refused."""

    where: str
    source: Source
    num_images: int
    fields: tuple[ProcessorField, ...] = ()
    header: str = ""


class ReadVideo(msgspec.Struct, tag=2, array_like=True):
    """A request to read a video. The reply is Prepared or Refused."""

    where: str
    source: Source
    sampling: Sampling
    fields: tuple[ProcessorField, ...] = ()


class OpenAudio(msgspec.Struct, tag=3, array_like=True):
    """A request to open an audio clip, which is the content, and resample it to `rate`. The reply is Opened or Refused.

    `limit` describes the limit that determines `max_seconds`. `size` is the size of the content in bytes. If it
    `may_be_silent`, a file without an audio track has no samples.
    """

    where: str
    rate: int
    max_seconds: float
    limit: str = "--max-audio-seconds"
    size: int = 0
    may_be_silent: bool = False


class ReadSamples(msgspec.Struct, tag=4, array_like=True):
    """A request to read at least `num_samples` samples of the open clip. The reply is Opened or Refused."""

    where: str
    num_samples: int


class Prepared(msgspec.Struct, tag=5, array_like=True):
    """The reply with a preprocessed image or video.

    The content is the data of its inputs, with these sizes in bytes.
    """

    text: str
    inputs: list[EncoderInput]
    sizes: list[int]
    is_video: bool


class Opened(msgspec.Struct, tag=6, array_like=True):
    """The reply with the next samples of a clip. The content is the samples as float32, with this size in bytes."""

    size: int = 0


class Refused(msgspec.Struct, tag=7, array_like=True):
    """The reply that the request is invalid. `param` names the request field."""

    param: str
    problem: str


class ReadDocument(msgspec.Struct, tag=8, array_like=True):
    """A request to read a PDF document, which is the content. The reply is DocumentText or Refused.

    `size` is the size of the content in bytes.
    """

    where: str
    size: int
    max_characters: int


class DocumentText(msgspec.Struct, tag=9, array_like=True):
    """The reply with the text of a document. The content is the text in UTF-8, with this size in bytes."""

    size: int


Request: TypeAlias = ReadImage | ReadVideo | OpenAudio | ReadSamples | ReadDocument
Reply: TypeAlias = Prepared | Opened | Refused | DocumentText | Exited

decode_request: Final = msgspec.msgpack.Decoder(Request).decode
decode_reply: Final = msgspec.msgpack.Decoder(Reply).decode
