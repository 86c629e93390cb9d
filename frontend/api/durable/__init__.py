"""Requests that outlive their clients and their frontends."""
