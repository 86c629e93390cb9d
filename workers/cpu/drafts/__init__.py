"""Drafts of the requests on a CPU: from their text, from recent answers, or from a draft model."""

from .lookup import Drafts, count_predictions

__all__ = ["Drafts", "count_predictions"]
