"""Built-in filters for `--dynamic-sampling-filter-path`."""

from __future__ import annotations

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.misc import flatten


def check_reward_nonzero_std(args, samples, **kwargs) -> DynamicFilterOutput:
    """Drop a group whose rewards are all equal: it has no advantage and so no gradient (DAPO, arXiv:2503.14476)."""
    rewards = [float(sample.get_reward_value(args)) for sample in flatten(samples)]
    keep = max(rewards) != min(rewards)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def prefer_reward_nonzero_std(args, samples, **kwargs) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, but rather fill the batch with such groups than sample more prompts."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = not output.keep
    return output
