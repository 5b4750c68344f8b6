"""LoRA adapters and the quantized weights below them."""
