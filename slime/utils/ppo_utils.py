"""The algorithm's formulas under the names that users import; they live in `slime.training`."""

from slime.training.advantages import (
    discounted_returns,
    get_grpo_returns,
    get_ppo_advantages_and_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
    whiten,
)
from slime.training.kl import approx_kl as compute_approx_kl
from slime.training.losses import cispo_loss as compute_cispo_loss
from slime.training.losses import clipped_policy_loss as compute_policy_loss

__all__ = [
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_policy_loss",
    "discounted_returns",
    "get_grpo_returns",
    "get_ppo_advantages_and_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
    "whiten",
]
