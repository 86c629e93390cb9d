"""Record the operations of a model in a native program, while its weights are read."""
