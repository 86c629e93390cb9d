"""Objects that endpoints keep for their clients."""
