"""The metadata of mmproj files, which hold the towers of GGUF models."""
