"""Reward functions of the system tests."""

import time


async def even_tokens(args, sample, **kwargs):
    """Share of even token ids: learnable, and different within a group."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(1, len(response))


async def raises(args, sample, **kwargs):
    if sample.index == 5:
        raise KeyError("no such answer")
    return 0.0


async def hangs(args, sample, **kwargs):
    if sample.index == 5:
        time.sleep(600)
    return 0.0
