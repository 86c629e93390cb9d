"""The drafts of requests on a CPU: looked up in their text or in recent answers, or written by a draft model."""

from .lookup import Drafts, count_predictions

__all__ = ["Drafts", "count_predictions"]
