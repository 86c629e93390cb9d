"""The tables of routes."""
