"""The base classes of encoders that read audio clips without silence after them."""

from typing import ClassVar, Literal

import msgspec


class UnpaddedSpec(msgspec.Struct, frozen=True):
    """The base of encoders that read clips without silence after them."""

    knows_window: ClassVar[bool] = False
    """True if outputs depend on the number of the window in its clip."""

    @property
    def frames_after(self) -> int:
        """The number of frames at the end of a clip for which no row is computed."""
        return 0

    @property
    def warm_frames(self) -> int:
        """The number of frames to warm up with; 0 for the maximum."""
        return 0

    @property
    def silence(self) -> Literal["skipped"]:
        """The treatment of silence after a clip, of which there is none."""
        return "skipped"


class LayeredSpec(UnpaddedSpec, frozen=True):
    """The sizes of the layers of such an encoder, of its inputs (`num_frames` at most) and of its outputs."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_frames: int
    output_size: int
