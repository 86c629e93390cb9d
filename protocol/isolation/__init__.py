"""Disposable processes that handle untrusted input, within limits that the kernel enforces."""
