"""slime: LLM post-training by reinforcement learning, from two CPU cores to a cluster."""

__version__ = "0.1.0"
