"""Families with bidirectional attention: encoders, and decoders that read the outputs of an encoder."""
