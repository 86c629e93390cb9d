"""Read the headers and configuration of a checkpoint, without torch. Frontends and workers use it; cores do not.

`gguf_config` and `mistral_config` translate other formats to the fields of Hugging Face, and `published` the fields of
models' own code. `vision`, `audio`, `state_spaces` and `pooling` describe parts of a model.
"""
