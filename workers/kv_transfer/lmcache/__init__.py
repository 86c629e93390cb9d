"""The connector to LMCache."""
