"""Decoder layers that combine their blocks and the residual stream in another way than `DecoderLayer`."""
