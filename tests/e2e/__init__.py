"""Tests with real servers. This is a package so that its fixtures end with its last test."""
