"""Requests that may crash a core, or have crashed one."""
