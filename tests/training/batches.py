"""Random rollout batches and the arguments that losses read."""

from argparse import Namespace

import numpy as np
import torch

from slime.training.rollout_data import RankData, partition_rollout_data
from slime.training.schedule import build_dp_schedule

DEFAULTS = {
    "loss_type": "policy_loss",
    "advantage_estimator": "grpo",
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": None,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k3",
    "kl_coef": 0.0,
    "use_unbiased_kl": False,
    "use_rollout_logprobs": False,
    "gamma": 1.0,
    "lambd": 1.0,
    "value_clip": 0.2,
    "calculate_per_token_loss": False,
    "use_opd": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "get_mismatch_metrics": False,
    "mis_level": "token",
    "mis_mode": "truncate",
    "mis_upper_bound": 2.0,
    "mis_lower_bound": 0.5,
    "mis_veto_threshold": None,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "custom_pg_loss_reducer_function_path": None,
    "opd_kl_coef": 1.0,
    "normalize_advantages": False,
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "custom_loss_function_path": None,
    "custom_advantage_function_path": None,
}


def make_args(**changes) -> Namespace:
    return Namespace(**{**DEFAULTS, **changes})


def random_batch(seed: int, samples: int = 9, max_response: int = 12, fan_out: bool = True, vocab: int = 50) -> dict:
    """Ragged samples with random masks; one is fully masked, one has no response, some share a trajectory."""
    rng = np.random.default_rng(seed)
    responses = rng.integers(1, max_response + 1, samples).tolist()
    responses[2] = 0
    prompts = rng.integers(1, 6, samples).tolist()
    masks = [rng.integers(0, 2, n).tolist() for n in responses]
    masks[0] = [0] * responses[0]
    masks[1] = [1] * responses[1]
    rollout_ids = [i // 2 if i < 4 and fan_out else i for i in range(samples)]
    return {
        "tokens": [rng.integers(0, vocab, p + r).tolist() for p, r in zip(prompts, responses, strict=True)],
        "total_lengths": [p + r for p, r in zip(prompts, responses, strict=True)],
        "response_lengths": responses,
        "loss_masks": masks,
        "rollout_log_probs": [(-rng.random(n) * 3).tolist() for n in responses],
        "rewards": rng.normal(size=samples).tolist(),
        "rollout_ids": rollout_ids,
        "sample_indices": [100 + i for i in range(samples)],
        "metadata": [{"row": i} for i in range(samples)],
    }


def random_tokens(seed: int, batch: dict, scale: float = 1.0) -> list[torch.Tensor]:
    """One float64 value per response token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=torch.float64) * scale for n in batch["response_lengths"]]


def rank_data(batch: dict, columns: dict[str, list[torch.Tensor]] | None = None, **schedule) -> list[RankData]:
    """The batch cut by a schedule, with per-token `columns` (in batch order) set on each rank."""
    options = {"dp_size": 1, "global_batch_size": len(batch["tokens"]), "micro_batch_size": len(batch["tokens"])}
    plan = build_dp_schedule(batch["total_lengths"], batch["rollout_ids"], **{**options, **schedule})
    ranks = [RankData(part) for part in partition_rollout_data(batch, plan)]
    for data in ranks:
        for key, values in (columns or {}).items():
            data.set_flat(key, [values[i - 100] for i in data["sample_indices"]])
    return ranks
