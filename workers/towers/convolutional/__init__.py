"""Vision towers that consist of convolutions: MobileNet-V5 (Gemma 3n), FastViT (FastVLM) and DaViT (Florence-2)."""
