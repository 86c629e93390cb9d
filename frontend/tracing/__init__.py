"""Traces of requests, exported by OpenTelemetry's protocol."""
