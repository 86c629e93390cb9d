"""What operators see of a frontend: Prometheus metrics, load reports and OpenTelemetry traces."""
