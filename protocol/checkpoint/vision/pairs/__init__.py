"""Vision towers that consist of two transformers, both of which read the whole image."""
