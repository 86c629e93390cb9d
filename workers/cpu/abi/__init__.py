"""The interface of the native library, as Python mirrors it: structs, enumerations and functions."""
