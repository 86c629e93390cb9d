"""The frontend's client of the cores: sends requests, resubmits them after crashes, and returns outputs."""
