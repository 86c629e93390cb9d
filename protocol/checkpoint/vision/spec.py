"""The vision tower of a model: what turns an image into embeddings for the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ...config.images import SpanKind

MAX_SIDE: Final = 4096
"""Upper bound of the side of an image that a tower reads, in pixels."""


@dataclass(frozen=True)
class VisionSpec:
    """A vision transformer (arXiv 2010.11929) and its projection into the decoder's hidden size.

    It reads square images of `image_size` pixels in patches of `patch_size`, each side by itself. With `max_outputs` it
    reads images of any size whose sides are multiples of `side_factor`, with up to as many embeddings. The pixels of a
    patch are stored channel by channel, or pixel by pixel with `has_channels_last`; `has_flat_patches` says that the
    tensor has two dimensions. With `normalizes_in_bfloat16` pixels are scaled and normalized in that precision.

    The features are the hidden states after each of `feature_layers`, side by side; later layers are not computed. CLIP
    (arXiv 2103.00020) has a class token, whose position is stored last with `has_class_last`, and a norm before the
    layers; SigLIP (arXiv 2303.15343) has a norm after them and a bias on patches. `positions` are learned for each
    patch ("patches"), or for each column and row ("axes"), or none. With `rope_theta` queries and keys are rotated by
    the column and the row: with alternating frequencies ("mixed", Pixtral, arXiv 2410.07073), or one half of a head by
    each, where elements are rotated with those a quarter of a head behind them ("halves", Gemma 4) or with their
    neighbors ("pairs", Llama 4). Beside a class token, which is not rotated, rows and columns are counted from 1.

    InternVL (arXiv 2504.10479) has stored factors on the output of each block. Norms of queries and keys are over all
    heads together ("full") or over each head ("head"). With `has_value_norm` values are divided by their root mean
    square. With `has_output_norms` the outputs of blocks are normed. With `has_gate` MLPs compute
    down(activation(gate(x)) * up(x)). With `clips_products` the inputs and outputs of products have stored bounds.

    First `merge_factor` squared neighboring patches become one row, side by side or as their mean. Then the projection
    is one of these:

    * "matrix": one product (Idefics3, arXiv 2408.12637)
    * "mlp": two, with `projection_activation` between them (LLaVA, arXiv 2310.03744), after a norm of the merged rows
      with `has_projection_norm`
    * "gated mlp": a product with 2 * `adapter_size` outputs, of which the first half is multiplied by the SiLU of the
      second, then another product; after the same norm if there is one (Aya Vision)
    * "merged mlp": the same after a norm of the patches and a product with the merged rows (Mistral 3)
    * "mean": a norm of the means, then one product (Gemma 3, arXiv 2503.19786)
    * "adapter": two products of `adapter_size` outputs without biases, each with an activation behind it, then a matrix
      (Llama 4)
    * "standardized mean": as before, but the means are first scaled by the root of the hidden size and, with
      `standardizes`, by stored factors after the subtraction of a stored mean; the norm has no weights (Gemma 4)

    With `has_newlines` an image may be a grid of tiles (`AnyresGrid`), whose rows end with a stored embedding; with
    `max_tiles` it is reduced (LLaVA-OneVision, arXiv 2408.03326).

    `span_kind` says which of the decoder's tokens see those behind them. Models with inputs of every layer read those
    of the token `layer_token_id` for images.

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
    projection: Literal[
        "matrix", "mlp", "gated mlp", "merged mlp", "mean", "standardized mean", "adapter"
    ]
    max_outputs: int = 0
    head_dim: int = 0
    attention_scale: float = 0.0
    merge_factor: int = 1
    projection_activation: str = "gelu"
    projection_bias: bool = True
    projection_eps: float = 1e-5
    has_projection_norm: bool = False
    adapter_size: int = 0
    normalizes_in_bfloat16: bool = False
    standardizes: bool = False
    has_class_token: bool = False
    keeps_class_token: bool = False
    has_class_last: bool = False
    has_patch_bias: bool = True
    has_flat_patches: bool = False
    has_channels_last: bool = False
    positions: Literal["patches", "axes"] | None = "patches"
    num_positions: int = 0
    rope_theta: float = 0.0
    rotary: Literal["mixed", "halves", "pairs"] = "mixed"
    has_pre_norm: bool = False
    has_post_norm: bool = False
    norm_kind: Literal["layer", "rms"] = "layer"
    has_layer_scales: bool = False
    qk_norm: Literal["full", "head"] | None = None
    has_value_norm: bool = False
    has_output_norms: bool = False
    has_gate: bool = False
    qkv_bias: bool = True
    product_bias: bool = True
    clips_products: bool = False
    has_newlines: bool = False
    max_tiles: int = 0
    span_kind: SpanKind | None = None
    layer_token_id: int = 0
    tensor_names: tuple[tuple[str, str], ...] = ()

    @property
    def size_of_heads(self) -> int:
        """The size of a head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def side_factor(self) -> int:
        """The sides of an image of any size are multiples of this."""
        return self.patch_size * self.merge_factor

    @property
    def num_patches(self) -> int:
        """The number of patches of a square image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_outputs(self) -> int:
        """The number of embeddings of an image, of which each takes the place of a token, or the most."""
        if self.max_outputs:
            return self.max_outputs
        return self.num_patches // self.merge_factor**2 + self.keeps_class_token
