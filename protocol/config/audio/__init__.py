"""The encoders of audio of a model."""
