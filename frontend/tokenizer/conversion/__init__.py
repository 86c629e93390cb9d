"""Convert tokenizers of other formats to the files of a Hugging Face directory."""
