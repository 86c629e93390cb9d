"""Files of tensors: safetensors files, read in parts and by other names, and files of packed matrices."""
