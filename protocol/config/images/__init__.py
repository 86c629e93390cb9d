"""Image preprocessing settings of a model: one class for each way to resize an image and cut it into tiles."""
