"""The place of an encoder's input in a prompt."""

import msgspec


class EncoderGrid(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """The grid of an encoder input's embeddings, row by row, for models with three-dimensional rotary positions.

    All embeddings have the same position in time.
    """

    rows: int
    """The number of rows of embeddings."""
    columns: int
    """The number of embeddings of a row."""
    time: int = 0
    """If the input continues a video, its position in time after the video's first frame."""
    continues: bool = False
    """True if the embeddings are the next frame of the previous input's video."""
    margin: int = 0
    """The number of embeddings before the grid, and of those after it, that are placed like text."""
    is_moment: bool = False
    """True if rows and columns count from 0, and the next token follows in time (Isaac, GLM-4V 9B)."""

    @property
    def num_tokens(self) -> int:
        """The number of embeddings."""
        return self.rows * self.columns + 2 * self.margin


class EncoderInput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """An image, an audio clip or similar input that replaces the prompt's tokens [position, position + num_tokens)."""

    position: int
    """The index of the first token that the input replaces."""
    num_tokens: int
    """The number of tokens that it replaces.

    It is 0 for the input of an encoder-decoder model, which the first token needs, and 1 with `read_until`.
    """
    content_hash: bytes
    """The hash of the content, 32 bytes. Equal hashes mean equal embeddings and an equal `grid`."""
    size: int
    """The number of embeddings that the encoder computes."""
    data: bytes = b""
    """The content, which only the workers can decode (see `payloads`), or the embeddings themselves."""
    row_length: int = 0
    """If not 0, the token after each `row_length` embeddings, such as a line break, keeps its own embedding."""
    grid: EncoderGrid | None = None
    """The grid of the embeddings, if positions have three coordinates."""
    embeddings: str = ""
    """If not empty, `data` has the embeddings: [size, hidden size] numbers of this dtype in row-major order."""
    places: bytes = b""
    """Instead of a grid, int32[tokens, 3]: the rotary positions of an image's tokens from the mark before it on.

    They are relative to the position that the mark has as text; those below 0 count as 0. Text follows the highest, and
    later inputs among the tokens have neither grid nor places.
    """
    read_until: int = 0
    """If not 0, nothing is replaced: cross attention of the tokens [position, read_until) reads the input."""
    follows: bool = False
    """True if the tokens up to `read_until` also read the previous encoder input of the prompt."""
    kept: bytes = b""
    """int32, ascending: the tokens that keep their own embeddings, as their distances from `position`."""
    first: int = 0
    """The number of embeddings before those that it reads, if several inputs share an encoder's output."""
