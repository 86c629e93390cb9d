"""Read the headers and configuration of a checkpoint, without torch."""
