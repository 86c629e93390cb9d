"""The base classes of encoders that read audio clips without silence after them."""

from abc import abstractmethod
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


class AddedSpec(LayeredSpec, frozen=True):
    """The base of causal encoders whose outputs are added to the embeddings of all tokens.

    A clip is read in parts of at most `num_frames` frames, each of which continues after the one before. Rows attend to
    the `window` rows up to themselves, which are rotated with the base `theta`.
    """

    intermediate_size: int
    head_dim: int
    window: int
    theta: float
    norm_eps: float
    activation: str

    @property
    @abstractmethod
    def frames_per_output(self) -> int:
        """The number of frames of an output."""

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for the frames of a part."""
        return num_frames // self.frames_per_output
