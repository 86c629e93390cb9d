"""The parts of audio towers before and around their layers."""
