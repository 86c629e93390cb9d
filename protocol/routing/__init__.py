"""The choice between replicas, which frontends make and `engine simulate` repeats for a fleet."""
