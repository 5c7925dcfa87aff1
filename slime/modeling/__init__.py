"""Hugging Face models as the trainer and the embedded engine both run them."""
