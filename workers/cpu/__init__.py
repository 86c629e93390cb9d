"""The native CPU backend: recorded programs of C++ kernels."""
