"""Messages between frontends and the store process."""
