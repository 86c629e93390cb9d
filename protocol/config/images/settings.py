"""The settings that all image processors share."""

import enum
from typing import Literal, Self, TypeAlias

import msgspec

Background: TypeAlias = Literal["white", "checkers"]


class SpanKind(enum.Enum):
    """The spans of tokens that attend to each other in both directions.

    `IMAGE`: the tokens of one image, within the layer's window. `IMAGE_IN_WINDOWS`: the same, but only in layers with a
    sliding window. `WHOLE_IMAGE`: the tokens of one image, also beyond the window. `PROMPT`: all tokens of the prompt,
    also beyond the window.
    """

    IMAGE = "image"
    IMAGE_IN_WINDOWS = "image in windows"
    WHOLE_IMAGE = "whole image"
    PROMPT = "prompt"


class ImageProcessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all image processors share.

    Attributes:
        token_id: The placeholder token. The embeddings of an image replace the embeddings of this token.
        output_size: The number of elements of an embedding, including the parts that are added after the decoder's
            first layers (DeepStack).
        num_outputs: The number of embeddings per tile; the maximum per image if it depends on the image's size.
        resample: The resampling filter, as a value of Pillow's `Resampling`.
        mark: The text that represents an image in prompts; if empty, the text of `token_id`. A number may replace {}.
        start: The text before an image, or before each tile if all tiles are alike.
        end: The text after an image or tile with `start`.
        number_start: The text before the number of an image in its prompt, which precedes the image. If it is empty,
            images are not numbered.
        first_number: The number of the first image.
        number_end: The text after the number.
        joint: The text between images or their tiles. Two in a row become one, and a space follows it before a word.
        mark_ids: Tokens around an image, or in it, whose embeddings the encoder computes, too.
        mark_texts: The texts of these tokens.
        ends_line: True if a line feed follows each tile, as a token of its own.
        after_images: The text after the last image. Prompts with it have all of their images at the beginning.
        prompt_start: If not empty, a prompt with images begins with this text and all of its images.
        prompt_end: The text at the end of a prompt with images.
        precedes_prompt: True if an image precedes all tokens of the text, also the first one (InstructBLIP).
        instruction_tokenizer: The directory of the tokenizer of the text that the encoder reads besides an image; if it
            is empty, the encoder reads no text.
        max_instruction_tokens: The maximum number of its tokens.
        is_required: True if each prompt needs an image.
        max_images: The maximum number of images in a prompt. If it is 0, they are not limited.
        stands_alone: True if a request has one image instead of a text, because the model embeds both separately.
        background: The color behind transparent pixels: white, or squares of 8 pixels in two grays (Inkling 2).
        scale: The factor that pixel values (0 to 255) are multiplied by.
        mean: The mean of each channel, which is subtracted from the scaled values.
        std: The standard deviation of each channel, by which the differences are divided.
    """

    token_id: int
    output_size: int
    num_outputs: int
    resample: int
    mark: str = ""
    start: str = ""
    end: str = ""
    number_start: str = ""
    number_end: str = ""
    first_number: int = 0
    joint: str = ""
    mark_ids: tuple[int, ...] = ()
    mark_texts: tuple[str, ...] = ()
    ends_line: bool = False
    after_images: str = ""
    prompt_start: str = ""
    prompt_end: str = ""
    precedes_prompt: bool = False
    instruction_tokenizer: str = ""
    max_instruction_tokens: int = 0
    is_required: bool = False
    max_images: int = 0
    stands_alone: bool = False
    background: Background = "white"
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def among(self, num_images: int) -> Self:
        """Return the settings for an image whose prompt has `num_images` images."""
        return self
