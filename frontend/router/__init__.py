"""`engine router`: several models behind one address. A model is loaded for its first request."""
