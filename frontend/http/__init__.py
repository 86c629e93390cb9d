"""HTTP connections, access control and error bodies."""
