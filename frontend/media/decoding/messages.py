"""Messages between a frontend and the processes that decode media for it."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from ....protocol.isolation.messages import Exited
from ....protocol.messages import EncoderInput
from ..frame_sampling import Sampling
from ..media_reader import ReaderConfig
from .limits import DecoderLimits


class Setup(msgspec.Struct):
    """What the processes are started with. `reader` is None for a model that reads only sounds."""

    reader: ReaderConfig | None
    limits: DecoderLimits


class Source(msgspec.Struct, array_like=True):
    """The division of a request's content into parts of these sizes in bytes.

    `is_text` if they are data URLs. `is_list` if they are the frames of a video.
    """

    sizes: list[int]
    is_text: bool = False
    is_list: bool = False


class ReadImage(msgspec.Struct, tag=1, array_like=True):
    """Read one of `num_images` images of a prompt. Answered by Prepared or Refused."""

    where: str
    source: Source
    num_images: int


class ReadVideo(msgspec.Struct, tag=2, array_like=True):
    """Read a video. Answered by Prepared or Refused."""

    where: str
    source: Source
    sampling: Sampling


class OpenSound(msgspec.Struct, tag=3, array_like=True):
    """Open a sound, which is the content, and resample it to `rate`. Answered by Opened or Refused.

    `limit` says what sets the `max_seconds` that it may take. `size` is that of the content in bytes.
    """

    where: str
    rate: int
    max_seconds: float
    limit: str = "--max-audio-seconds"
    size: int = 0


class ReadSamples(msgspec.Struct, tag=4, array_like=True):
    """Read so many samples of the open sound, or more. Answered by Opened or Refused."""

    where: str
    num_samples: int


class Prepared(msgspec.Struct, tag=5, array_like=True):
    """An image or a video as the model reads it. The content has the data of its inputs, of these sizes in bytes."""

    text: str
    inputs: list[EncoderInput]
    sizes: list[int]
    is_video: bool


class Opened(msgspec.Struct, tag=6, array_like=True):
    """The next samples of a sound, float32, are the content, which has this size in bytes."""

    size: int = 0


class Refused(msgspec.Struct, tag=7, array_like=True):
    """The request is invalid: `param` names its field."""

    param: str
    problem: str


Request: TypeAlias = ReadImage | ReadVideo | OpenSound | ReadSamples
Reply: TypeAlias = Prepared | Opened | Refused | Exited

decode_request: Final = msgspec.msgpack.Decoder(Request).decode
decode_reply: Final = msgspec.msgpack.Decoder(Reply).decode
