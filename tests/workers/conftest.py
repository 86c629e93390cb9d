from support.triton_interpreter import interpret_without_gpu

# Before any test imports a kernel.
interpret_without_gpu()
