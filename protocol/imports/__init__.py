"""Importing less of packages than all of their modules."""
