"""Group-relative rewards. numpy only: the rollout manager calls this."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

STD_EPS = 1e-6
STD_ESTIMATORS = ("grpo", "gspo", "cispo")
CENTERED_ESTIMATORS = (*STD_ESTIMATORS, "reinforce_plus_plus_baseline")


def normalize_rewards(
    args: Namespace, rewards: Sequence[float], group_index: Sequence[int], rollout_ids: Sequence[int]
) -> list[float]:
    """Rewards relative to the samples of the same prompt.

    (r - mean) / (std + 1e-6) with the unbiased std (ddof 1) over the prompt's trajectories; without the division for
    reinforce_plus_plus_baseline and without `args.grpo_std_normalization`; r itself without
    `args.rewards_normalization` and for the other estimators. Groups may differ in size; a group of one gives 0.

    A trajectory that was split into several samples (same rollout id in one group) counts once, with the mean of its
    samples' rewards. Samples that are removed from training count like all others.

    Raises:
        ValueError: a sample has no group or the arrays differ in length.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if args.advantage_estimator not in CENTERED_ESTIMATORS or not args.rewards_normalization:
        return values.tolist()
    if not len(values) == len(group_index) == len(rollout_ids):
        raise ValueError(
            f"{len(values)} rewards, {len(group_index)} group indices and {len(rollout_ids)} rollout ids differ"
        )
    if any(group is None for group in group_index):
        missing = [i for i, group in enumerate(group_index) if group is None]
        raise ValueError(f"group normalisation needs Sample.group_index; samples {missing[:8]} have none")

    groups: dict[int, dict[int, list[int]]] = {}
    for i, (group, rollout) in enumerate(zip(group_index, rollout_ids, strict=True)):
        groups.setdefault(group, {}).setdefault(rollout, []).append(i)
    divide = args.advantage_estimator in STD_ESTIMATORS and args.grpo_std_normalization
    out = np.empty_like(values)
    for trajectories in groups.values():
        scores = np.array([values[pieces].mean() for pieces in trajectories.values()])
        members = [i for pieces in trajectories.values() for i in pieces]
        out[members] = values[members] - scores.mean()
        if divide and len(scores) > 1:
            out[members] /= scores.std(ddof=1) + STD_EPS
    return out.tolist()
