"""Read the image and video preprocessing settings of a checkpoint, from the files of transformers' processors."""
