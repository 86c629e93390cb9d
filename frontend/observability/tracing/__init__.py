"""Traces of requests, exported by the OpenTelemetry protocol (OTLP)."""
