"""Vision and audio towers, whose outputs replace the embeddings of tokens."""
