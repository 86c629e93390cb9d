"""Multi-head latent attention, and the indexer of its sparse variant."""
