"""Operations of a model, written into a native program while its weights are read."""
