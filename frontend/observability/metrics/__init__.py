"""Prometheus metrics of one engine."""
