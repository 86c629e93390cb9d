"""Read the configs of encoders of audio."""
