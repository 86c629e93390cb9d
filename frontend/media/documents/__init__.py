"""Read the text of PDF documents in requests."""
