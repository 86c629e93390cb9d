"""Layers and transformer blocks whose weights several layers share, and the layers that use them."""
