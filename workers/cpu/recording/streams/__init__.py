"""Record the streams of a token, which are several hidden states."""
