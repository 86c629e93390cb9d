"""The projection of frames of samples in models without an audio tower (Gemma 4's unified models).

Shapes: C samples of a frame, N frames.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.samples import FrameSpec
from ..image_tower import TowerSource

_NAME = "embed_audio.embedding_projection"
_MARKER = f"{_NAME}.weight"


class FrameProjection:
    """The norm and the matrix that `spec` describes.

    Raises:
        CheckpointError: The matrix is missing or has another shape.
    """

    def __init__(self, spec: FrameSpec, source: TowerSource) -> None:
        tensors = source.weights(_MARKER)
        self._eps = spec.norm_eps
        self._output = tensors.read_linear(
            _NAME, spec.output_size, spec.num_mel_bins, has_bias=False
        )

    def __call__(self, features_CN: Tensor) -> Tensor:
        """Return an output [N, output size] for each frame."""
        x_NC = features_CN.T
        return self._output(F.rms_norm(x_NC, x_NC.shape[1:], None, self._eps))
