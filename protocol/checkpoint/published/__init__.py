"""Configs in the formats in which authors publish models that read images, given the fields that transformers has."""
