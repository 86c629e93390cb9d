"""The sizes of tiny audio encoders."""

NUM_MEL_BINS = 16

SAMPLES = {
    "hidden_size": 32,
    "conv_dim": [8, 12, 16],
    "conv_kernel": [10, 8, 4],
    "conv_stride": [8, 8, 5],
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
"""The sizes of the encoder of wav2vec 2.0."""
