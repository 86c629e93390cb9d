"""MobileNet-V5, the network that Gemma 3n reads images with."""
