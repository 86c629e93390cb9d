"""Routes that pause, unload, drain and restart replicas."""
