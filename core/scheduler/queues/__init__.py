"""Scheduling policies, and limits on which waiting requests are admitted."""
