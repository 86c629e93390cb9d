"""Devices: memory, transfers, graphs and errors."""
