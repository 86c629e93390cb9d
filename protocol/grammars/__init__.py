"""Grammars of structured outputs, and the processes in which they are compiled and used."""
