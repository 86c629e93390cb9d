"""The observability of a frontend: Prometheus metrics, load reports and OpenTelemetry traces."""
