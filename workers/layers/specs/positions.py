"""Tables of position embeddings that are not stored."""

from typing import Literal

Sinusoids = Literal["by size", "by size, scaled", "by last"]
"""The place where frequencies fall to 1 / 10,000: just after the last one (arXiv 1706.03762), or at it (tensor2tensor).

Scaled rows are divided by the square root of their size (NeMo).
"""
