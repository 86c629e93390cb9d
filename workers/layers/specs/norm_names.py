"""The names of norms as data."""

import msgspec


class NormNames(msgspec.Struct, frozen=True):
    """The checkpoint's name of each norm of a layer; None if the family has no such norm."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None
    cross_input: str | None = None
    cross_output: str | None = None
    attention_sum: str | None = None
    """The norm of the sum of attention's input and output, which replaces the output. Only where norms are applied to
    the stream.
    """

    @property
    def of_blocks(self) -> tuple[str | None, ...]:
        """The names of the norms of the inputs and outputs of attention and MLP."""
        return self.attention_input, self.attention_output, self.mlp_input, self.mlp_output
