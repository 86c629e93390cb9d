"""Model sources: find and download the model to serve, and read its configuration."""
