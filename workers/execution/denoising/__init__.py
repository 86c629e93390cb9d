"""The passes of block-diffusion models: candidates for the tokens of a block, and the rules that choose among them."""
