"""Tests with real servers. As a package, so that its fixtures end with its last test."""
