"""Tests of a frontend over HTTP. This is a package so that its fixtures end with its last test."""
