"""Disposable processes for work on untrusted input, with limits that the kernel enforces."""
