"""The descriptions of vision towers, which turn images into embeddings for the decoder, and of encoders in them."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

import msgspec

from ...config.images.settings import SpanKind
from ...config.query_former import QueryFormerSpec

MAX_SIDE: Final = 4096
"""Maximum side, in pixels, of the images that a tower reads."""


class TowerSpec(msgspec.Struct, frozen=True):
    """A vision tower for a causal decoder whose positions have one coordinate."""

    has_axes: ClassVar[bool] = False
    """True if the decoder's positions have three coordinates."""
    span_kind: ClassVar[SpanKind | None] = None
    """The kind of the decoder's tokens that attend to later tokens; None if no tokens do."""
    added_after: ClassVar[tuple[int, ...]] = ()
    """The decoder's layers, from 0, after which other parts of an output are added."""

    @property
    def num_page_outputs(self) -> int:
        """The number of embeddings of an image that cross attention reads; 0 for other images."""
        return 0


class SamSpec(msgspec.Struct, frozen=True):
    """SAM's image encoder (arXiv 2304.02643), and two convolutions with a stride that reduce its outputs.

    Its patches attend within windows of `window_size` x `window_size`, which are padded, except in `full_layers`,
    counted from 1. The positions of patches relative to each other change attention scores.

    Attributes:
        neck_size: The number of channels after the layers.
        middle_size: The number of channels between the two convolutions, each of which halves both sides.
        output_size: The number of elements of a feature.
        early_layer: If not 0, the output of this layer, counted from 1, is also reduced to features, with channels of
            its own before the two convolutions. The features are the sum of both, the first one times a stored factor.
        feature_side: If not 0, the inputs of the two convolutions are interpolated so that images have this many
            features in each direction.
    """

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    activation: str
    norm_eps: float
    window_size: int
    full_layers: tuple[int, ...]
    neck_size: int
    middle_size: int
    output_size: int
    early_layer: int = 0
    feature_side: int = 0

    @property
    def side(self) -> int:
        """The number of patches of a whole image in each direction."""
        return self.image_size // self.patch_size

    @property
    def unit(self) -> int:
        """The side, in pixels, of the square of an image that becomes one feature, unless `feature_side` is given."""
        return 4 * self.patch_size


class WindowQueries(msgspec.Struct, frozen=True):
    """The queries that make a part of each embedding: the name of their weights, and the feature layer that they read.

    A query starts with the mean of its patches, or if `offset` is not negative, with one patch of 2 x 2.
    """

    name: str
    offset: int = -1
    feature: int = 0


class WindowsSpec(msgspec.Struct, frozen=True):
    """The projection "windows", which makes `query_side` x `query_side` embeddings of each window of patches.

    The patches of a window, `window_side` x `window_side`, have learned positions, and so have the queries.

    Attributes:
        queries: The layers of each Q-Former.
        parts: The queries of each part, in the order of the decoder's layers.
        begins_with_zeros: True if the first part, in the place of a token's embedding, is zero, also at ends of rows.
    """

    query_side: int
    window_side: int
    queries: QueryFormerSpec
    parts: tuple[WindowQueries, ...]
    begins_with_zeros: bool


class PageSpec(msgspec.Struct, frozen=True):
    """Pages of `height` x `width` pixels, which cross attention reads (Nemotron Parse).

    A matrix and a norm change each patch, and others join `columns_per_output` neighbors of a row. Patches beyond them
    at the end of a row are not used. The last output is a matrix and a norm of the outputs of learned rows before the
    patches, whose numbers are `summary`.
    """

    height: int
    width: int
    summary: tuple[int, ...]
    columns_per_output: int = 4


class PerceiverSpec(msgspec.Struct, frozen=True):
    """The projection "perceiver": a gated MLP for each patch, and `num_layers` layers with learned queries.

    The queries of a layer attend to the patches and to themselves. A gated MLP follows, with four times as many
    elements in between. `inner_size` is the intermediate size of the first MLP.
    """

    inner_size: int
    inner_activation: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str


class VisionSpec(msgspec.Struct, frozen=True):
    """A vision transformer (arXiv 2010.11929) and its projection to the decoder's hidden size.

    It reads square images of `image_size` x `image_size` pixels, divided into patches of `patch_size` x `patch_size`.

    Attributes:
        feature_layers: Layers, counted from 1, whose hidden states are concatenated as the features. Later layers are
            not computed.
        projection: The way in which features become embeddings; see below.
        max_outputs: If not 0, images may have any size whose sides are multiples of `side_factor`, up to this many
            embeddings.
        merge_factor: Squares of this side, in patches, are first merged into one row, concatenated or as their mean.
        projection_activation: The activation of the projection "mlp".
        output_scale: The factor of the first part of the outputs of "connector", and of those of "gated squares" and
            "latents".
        has_projection_norm: True if "mlp" and "gated mlp" norm the merged rows first.
        adapter_size: The intermediate size of "gated mlp" and of "mlp" (if 0, of "mlp" the output size), and the output
            size of "adapter".
        normalizes_in_bfloat16: True if pixels are scaled and normalized in bfloat16.
        standardizes: True if the projection "standardized mean" subtracts a stored mean and multiplies by stored
            factors.
        has_class_token: True if there is a class token, as in CLIP (arXiv 2103.00020). With one, rows and columns are
            counted from 1, and the class token is not rotated.
        has_teacher_token: True if a second class token follows the first one (DeiT, arXiv 2012.12877).
        num_registers: The number of learned rows before the patches, of which the first is the class token. They have
            no positions, and their outputs are not used (DINOv2 with registers, arXiv 2309.16588).
        has_class_last: True if the position of the class token is stored last.
        has_flat_patches: True if the checkpoint stores the patch projection with two dimensions.
        has_channels_last: True if the pixels of a patch are stored pixel by pixel, else channel by channel.
        positions: Positions are learned for each patch of a square image, or for each row and column ("axes", or
            "tables" if they are stored apart, after a position of padding). Patches
            of images of any size may read the position that is nearest to theirs in a square one ("nearest", or
            "stepped" or "inverse" if places are multiples of a distance that is rounded in one of two ways). None if
            they are not learned.
        margins: The treatment of the patches of margins at the right and at the bottom of an image. They are left out
            (Aria), or other patches do not attend to them (Phi-4-multimodal). None if there are no margins.
        rope_theta: If not 0, queries and keys are rotated by column and row.
        place_scale: The factor of rows and columns in that rotation.
        rotary: The rotation of heads. "mixed" alternates frequencies of both (Pixtral, arXiv 2410.07073). Otherwise
            half of a head is rotated by each. An element is rotated with the one a quarter of a head later ("halves",
            Gemma 4) or with its neighbor ("pairs", Llama 4).
        window_layer: If not 0, squares of 2 x 2 patches become one patch after this layer (MiniCPM-V 4.6).
        has_pre_norm: True if there is a norm before the layers, as in CLIP.
        has_patch_norm: True if the embeddings of patches are normed before positions are added.
        has_post_norm: True if there is a norm after the layers, as in SigLIP (arXiv 2303.15343).
        post_norm_kind: The kind of that norm.
        has_layer_scales: True if stored factors multiply the output of each block (InternVL, arXiv 2504.10479).
        qk_norm: Queries and keys are normed over all heads together ("full") or per head ("head"); None if not at all.
        has_value_norm: True if values are divided by their root mean square.
        has_input_norms: True if the inputs of blocks are normed.
        has_output_norms: True if the outputs of blocks are normed.
        has_gate: True if MLPs compute down(activation(gate(x)) * up(x)).
        clips_products: True if the inputs and outputs of products are clipped to stored bounds.
        num_words: The number of rows of the table of the projection "words".
        num_marks: The number of its last rows, which are the embeddings of the marks in an image's text.
        chooses_words: True if each patch has only its most likely word.
        has_newlines: True if an image may be a grid of tiles (`AnyresGrid`), each row of which ends with a stored
            embedding.
        has_columns_first: True if the embeddings of a square image are in the order of columns.
        max_tiles: The maximum number of tiles to whose patches such a grid is reduced (LLaVA-OneVision, arXiv
            2408.03326).
        has_rows: True if an image is read as a whole and as a grid of tiles. Each row of both ends with a stored
            embedding, and another one is between them (DeepSeek-VL2, arXiv 2412.10302).
        has_crops: True if an image is a canvas of tiles, besides which a small copy of the whole canvas is read.
        query_counts: Pairs (patches of a side, number of queries) for the projection "queries".
        windows: The details of the projection "windows".
        perceiver: The details of the projection "perceiver".
        former: The Q-Former of the projection "former", which has `num_queries` learned queries.
        num_query_heads: The number of heads of the projection "latents", which has `num_queries` learned queries.
        added_after: The decoder's layers, from 0, after which the parts of an embedding but the first are added. All
            parts count in `output_size`.
        span_kind: Which of the decoder's tokens attend to later tokens.
        fine: The encoder of a larger copy of the image, whose features the projection "joined" reads, too.
        is_read: True if cross attention reads the embeddings, which then replace no tokens (TrOCR).
        has_axes: True if the decoder's positions have three coordinates (MiniCPM-V 4.7, GLM-4V 9B), else one.
        tensor_names: Translates the checkpoint's tensor names to CLIP's, as in `ModelSpec`.

    The projections are:

    * "none": the features themselves (TrOCR, arXiv 2109.10282)
    * "matrix": one product (Idefics3, arXiv 2408.12637)
    * "normed matrix": one product, then a norm (GIT, arXiv 2205.14100)
    * "mlp": two products with an activation in between (LLaVA, arXiv 2310.03744)
    * "mlp mean": as "mlp" for each patch, and then the means. If the factor does not divide the patches of a side,
      squares overlap (Perception LM, arXiv 2504.13180)
    * "convolved mlp": as "mlp" for each patch, and then two blocks of convolutions for each element. The second one has
      a stride of `merge_factor` (MobileVLM, arXiv 2312.16886)
    * "pooled mlp": as "mlp" for each patch, and then the means of the squares, to which a convolution of them for each
      element is added (MobileVLM V2, arXiv 2402.03766)
    * "padded mlp": as "mlp", with squares that are completed by zeros. The first matrix stores columns by element, then
      by patch (DeepSeek-VL2)
    * "normed squares": a norm of squares that are completed by zeros, a product with `adapter_size` outputs, an
      activation and another norm, then as "mlp" (NVILA-Lite, arXiv 2412.04468)
    * "joined": a product of the features of each encoder with half of the outputs, then the activation of both and
      another product (DeepSeek-VL 7B, arXiv 2403.05525)
    * "gated mlp": a product with 2 * `adapter_size` outputs, of which the first half is multiplied by the SiLU of the
      second, then another product (Aya Vision)
    * "gated squares": a convolution of squares, a product, a norm and a gated MLP with `adapter_size` elements in
      between; a stored embedding precedes the results, and another one follows them (GLM-4V 9B)
    * "merged mlp": a norm of the patches and a product with the merged rows, then as "mlp" (Mistral 3)
    * "mean": a norm of the means, then one product (Gemma 3, arXiv 2503.19786)
    * "squares": the merged rows, as the first part of a projection that reads all tiles of an image (Phi-3-Vision)
    * "means": the means, as the first part of a projection that reads all tiles of an image (Phi-4-multimodal)
    * "standardized mean": as "mean", but the means are first scaled by the square root of the hidden size and possibly
      standardized, and the norm has no weights (Gemma 4)
    * "words": a product and a norm, whose softmax is the distribution of a patch over the visual words of a table
      (Ovis, arXiv 2405.20797)
    * "queries": one of the sets of learned queries in `query_counts` attends to the patches, with the heads of the
      tower, before a norm and two products (Aria, arXiv 2410.05993)
    * "resampler": `max_outputs` learned queries attend to the patches, whose keys have fixed positions, with heads of
      128 elements, before a norm and one product (MiniCPM-V 2.6, arXiv 2408.01800)
    * "class": a product of the class token alone, whose result is the embedding of an image without a decoder (CLIP)
    * "probe": a learned query attends to the patches before an MLP; the result is as for "class" (SigLIP)
    * "connector": norms and products of the last layer's features, with fixed positions in between; other parts are a
      norm and two products of the features of other layers (Granite for Docling)
    * "windows": learned queries read windows of patches, several times with other weights (Granite 4 Vision)
    * "former": the outputs of a Q-Former, which reads the patches and the class token, and a product (BLIP-2). In
      InstructBLIP it reads a text as well
    * "latents": a product of the features, which are first divided by their lengths. Learned queries attend to them and
      to themselves, before another product (Kosmos-2, arXiv 2306.14824)
    * "perceiver": several layers, in which `max_outputs` learned queries read the patches (Idefics2, arXiv 2405.02246)
    * "adapter": two products with `adapter_size` outputs and no biases, each followed by an activation, then a matrix
      (Llama 4)
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
        "none",
        "matrix",
        "normed matrix",
        "mlp",
        "mlp mean",
        "convolved mlp",
        "padded mlp",
        "normed squares",
        "pooled mlp",
        "joined",
        "gated mlp",
        "gated squares",
        "merged mlp",
        "mean",
        "squares",
        "means",
        "standardized mean",
        "words",
        "queries",
        "resampler",
        "class",
        "probe",
        "connector",
        "windows",
        "former",
        "latents",
        "perceiver",
        "adapter",
    ]
    max_outputs: int = 0
    head_dim: int = 0
    attention_scale: float = 0.0
    merge_factor: int = 1
    projection_activation: str = "gelu"
    projection_bias: bool = True
    projection_eps: float = 1e-5
    output_scale: float = 1.0
    has_projection_norm: bool = False
    adapter_size: int = 0
    normalizes_in_bfloat16: bool = False
    standardizes: bool = False
    has_class_token: bool = False
    keeps_class_token: bool = False
    has_teacher_token: bool = False
    num_registers: int = 0
    has_class_last: bool = False
    has_patch_bias: bool = True
    has_flat_patches: bool = False
    has_channels_last: bool = False
    positions: Literal["patches", "axes", "tables", "nearest", "stepped", "inverse"] | None = (
        "patches"
    )
    num_positions: int = 0
    margins: Literal["left out", "unseen"] | None = None
    rope_theta: float = 0.0
    place_scale: float = 1.0
    rotary: Literal["mixed", "halves", "pairs"] = "mixed"
    window_layer: int = 0
    has_pre_norm: bool = False
    has_patch_norm: bool = False
    has_post_norm: bool = False
    post_norm_kind: Literal["layer", "rms"] = "layer"
    norm_kind: Literal["layer", "rms"] = "layer"
    has_layer_scales: bool = False
    qk_norm: Literal["full", "head"] | None = None
    has_value_norm: bool = False
    has_input_norms: bool = True
    has_output_norms: bool = False
    has_gate: bool = False
    qkv_bias: bool = True
    product_bias: bool = True
    clips_products: bool = False
    num_words: int = 0
    num_marks: int = 0
    chooses_words: bool = False
    has_newlines: bool = False
    has_columns_first: bool = False
    max_tiles: int = 0
    has_rows: bool = False
    has_crops: bool = False
    query_counts: tuple[tuple[int, int], ...] = ()
    fine: SamSpec | None = None
    windows: WindowsSpec | None = None
    perceiver: PerceiverSpec | None = None
    former: QueryFormerSpec | None = None
    num_queries: int = 0
    num_query_heads: int = 0
    added_after: tuple[int, ...] = ()
    span_kind: SpanKind | None = None
    is_read: bool = False
    has_axes: bool = False
    tensor_names: tuple[tuple[str, str], ...] = ()

    @property
    def stands_alone(self) -> bool:
        """True if no decoder reads the images, whose embeddings are results themselves."""
        return self.projection in ("class", "probe")

    @property
    def size_of_heads(self) -> int:
        """The number of elements of a head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def side_factor(self) -> int:
        """The number of pixels that must divide both sides of an image of any size."""
        return self.patch_size * self.merge_factor * (2 if self.window_layer else 1)

    @property
    def num_patches(self) -> int:
        """The number of patches of a square image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_page_outputs(self) -> int:
        """The number of embeddings of an image that cross attention reads; 0 for other images."""
        return self.num_outputs if self.is_read else 0

    @property
    def num_outputs(self) -> int:
        """The number of embeddings of an image, each of which replaces one token; a maximum if sizes vary."""
        if self.stands_alone:
            return 1
        if self.max_outputs:
            return self.max_outputs
        if self.num_queries:
            return self.num_queries
        if self.windows is not None:
            rate = self.windows.query_side / self.windows.window_side
            return round(self.num_patches * rate**2)
        if self.projection in ("padded mlp", "normed squares"):
            return (-(-(self.image_size // self.patch_size) // self.merge_factor)) ** 2
        if self.projection == "mlp mean":
            return (self.image_size // self.patch_size // self.merge_factor) ** 2
        num_marks = (
            2
            if self.projection == "gated squares"
            else self.keeps_class_token + self.has_teacher_token
        )
        return self.num_patches // self.merge_factor**2 + num_marks
