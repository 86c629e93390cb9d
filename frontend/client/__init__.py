"""The frontend's client of the engine: requests to the cores, and their outputs."""
