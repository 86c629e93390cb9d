"""Vision towers that consist of convolutions: MobileNet-V5 (Gemma 3n) and FastViT (FastVLM)."""
