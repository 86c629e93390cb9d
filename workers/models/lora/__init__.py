"""LoRA adapters, and the products and tables in torch that they change."""
