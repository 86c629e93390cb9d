"""Cut images into what vision towers read, exactly as transformers' processors with Pillow do."""
