"""Inputs of requests that are neither text nor token ids."""
