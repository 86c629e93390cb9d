"""Extract the text of PDF documents, which are untrusted. Call this in a decoder process."""

from __future__ import annotations

import io
import logging
from typing import Any, Final

from ....protocol.errors import ParameterError

MAX_PAGES: Final = 600
"""Maximum pages of a document, as in Anthropic's API."""

MAX_CHARACTERS: Final = 1 << 22
"""Maximum characters in the documents of a request. Compressed text can be far larger than its file."""


def read_pdf(data: bytes, where: str, max_characters: int) -> str:
    """Return the text of a PDF document, with an empty line between pages.

    Args:
        data: The content of the file.
        where: The name of the field in errors.
        max_characters: The maximum number of characters of text.

    Raises:
        ParameterError: The document is encrypted, too long or without text, or pypdf is not installed.
    """
    pages = _open(data, where).pages
    if len(pages) > MAX_PAGES:
        raise ParameterError(
            where, f"has {len(pages)} pages, but at most {MAX_PAGES} are allowed; send fewer pages"
        )
    texts: list[str] = []
    num_characters = 0
    for page in pages:
        texts.append(page.extract_text().strip())
        num_characters += len(texts[-1])
        if num_characters > max_characters:
            raise ParameterError(
                where,
                f"has too much text: the documents of a request may have {MAX_CHARACTERS} characters in "
                "all; send fewer pages",
            )
    if not num_characters:
        raise ParameterError(where, "contains no text, only graphics; send its pages as images")
    # A document may contain halves of surrogate pairs, which are not valid in a prompt.
    text = "\n\n".join(filter(None, texts))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _open(data: bytes, where: str) -> Any:
    try:
        import pypdf
    except ImportError:
        raise ParameterError(
            where,
            "is a PDF document, which this server cannot read without pypdf: install the extra "
            "engine-serve[media], or send the document as text",
        ) from None
    # It logs a warning for each deviation from the standard.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ParameterError(where, "is encrypted; send a document without a password")
    return reader
