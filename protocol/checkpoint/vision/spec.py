"""The vision tower of a model: what turns an image into embeddings for the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

MAX_SIDE: Final = 4096
"""Upper bound of the side of an image that a tower reads, in pixels."""


@dataclass(frozen=True)
class VisionSpec:
    """A vision transformer (arXiv 2010.11929) and its projection into the decoder's hidden size.

    It reads square images of `image_size` pixels in patches of `patch_size`, each side by itself. The features are the
    hidden states after each of `feature_layers`, side by side; later layers are not computed. CLIP (arXiv 2103.00020)
    has a class token and a norm before the layers, SigLIP (arXiv 2303.15343) a norm after them and a bias on patches.

    InternVL (arXiv 2504.10479) has stored factors on the output of each block, and may have norms of queries and keys,
    over all heads together.

    First `shuffle_factor` squared neighboring patches become one row, which is normed with `has_projection_norm`. Then
    the projection is a "matrix" (Idefics3, arXiv 2408.12637), or an "mlp": two matrices with `projection_activation`
    between them (LLaVA, arXiv 2310.03744).

    `tensor_names` translates the checkpoint's tensor names to those of CLIP, as in `ModelSpec`.
    """

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    feature_layers: tuple[int, ...]
    activation: str
    norm_eps: float
    output_size: int
    projection: Literal["matrix", "mlp"]
    shuffle_factor: int = 1
    projection_activation: str = "gelu"
    projection_bias: bool = True
    has_projection_norm: bool = False
    has_class_token: bool = False
    keeps_class_token: bool = False
    has_patch_bias: bool = True
    has_pre_norm: bool = False
    has_post_norm: bool = False
    norm_kind: Literal["layer", "rms"] = "layer"
    has_layer_scales: bool = False
    has_qk_norm: bool = False
    qkv_bias: bool = True
    tensor_names: tuple[tuple[str, str], ...] = ()

    @property
    def num_patches(self) -> int:
        """The number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_outputs(self) -> int:
        """The number of embeddings of an image, of which each takes the place of a token."""
        return self.num_patches // self.shuffle_factor**2 + self.keeps_class_token
