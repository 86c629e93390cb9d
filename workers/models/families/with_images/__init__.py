"""Families that read images, whose decoders no other family has."""
