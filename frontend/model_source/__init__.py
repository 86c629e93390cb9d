"""Finding, downloading and configuring the model to serve."""
