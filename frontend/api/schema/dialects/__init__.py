"""The request bodies of APIs with one or two routes for texts."""
