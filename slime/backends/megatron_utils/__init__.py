"""The Megatron-Core trainer, on stock `megatron-core`."""
