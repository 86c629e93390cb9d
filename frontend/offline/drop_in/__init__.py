"""The classes that scripts for vLLM expect beside `LLM`."""
