"""The native CPU backend: a model's operations, recorded once as a program of C++ kernels and run in every step."""
