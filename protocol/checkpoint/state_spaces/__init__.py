"""Read the sizes of state-space layers from configs."""
