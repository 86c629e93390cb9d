"""LoRA adapters, and the torch products and tables that they change."""
