"""Devices: their memory, transfers, captured graphs and errors."""
