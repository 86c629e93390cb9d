"""The decoders that turn the rows of an encoder of speech into tokens."""

import msgspec


class CtcSpec(msgspec.Struct, frozen=True, tag=True):
    """Connectionist temporal classification (Graves et al., ICML 2006): a matrix that scores all tokens at every row.

    Equal tokens of successive rows are one token, and the token `blank` is none.
    """

    vocab_size: int
    blank: int


class TransducerSpec(msgspec.Struct, frozen=True, tag=True):
    """A transducer (arXiv 1211.3711): LSTM layers read the tokens so far, and a network joins their output with a row.

    The token `blank` moves on to the next row; after `max_symbols` other tokens at a row, the next one is read anyway.
    With `durations`, each token also predicts by how many rows to move (arXiv 2304.06795).
    """

    vocab_size: int
    blank: int
    hidden_size: int
    num_layers: int
    activation: str
    max_symbols: int
    durations: tuple[int, ...] = ()
