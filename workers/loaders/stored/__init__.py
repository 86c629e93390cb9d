"""The tensors of safetensors files, as parts of other tensors and by other names."""
