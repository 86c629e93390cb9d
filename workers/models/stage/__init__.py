"""The parts of a pipeline stage around its layers: the embedding, inputs of layers beside the stream, and the head."""
