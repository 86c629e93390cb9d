"""Tests of a frontend over HTTP. As a package, so that its fixtures end with its last test."""
