"""A small training problem on which every algorithm runs serially and in parallel."""

import torch

from slime.training.context_parallel import ALONE, local_row
from slime.training.logprobs import log_probs_from_logits
from slime.training.losses import compute_loss, compute_value_loss
from slime.training.reducers import make_reducer
from tests.training.batches import random_batch, random_tokens, rank_data

ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
MIS = {"use_tis": True, "custom_tis_function_path": "slime.training.mis.mis_function"}
ALGORITHMS = {
    "grpo": {},
    "clip_higher": {"eps_clip": 0.1, "eps_clip_high": 0.28},
    "dual_clip": {"eps_clip_c": 1.5},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.08},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.3},
    "entropy": {"entropy_coef": 0.02},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"},
    "unbiased_kl": {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True},
    "rollout_old": {"use_rollout_logprobs": True},
    "opsm": {"use_opsm": True, "opsm_delta": 0.05},
    "gspo_opsm": {"advantage_estimator": "gspo", "eps_clip": 0.05, "use_opsm": True, "opsm_delta": 0.05},
    "tis": {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.4},
    "cispo_tis": {"advantage_estimator": "cispo", "eps_clip": 1.0, "use_tis": True, "tis_clip": 1.5},
    "mismatch": {"get_mismatch_metrics": True},
    "icepop": {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.5, "custom_tis_function_path": ICEPOP},
    "mis_token_mask": {**MIS, "mis_mode": "mask"},
    "mis_token_clip": {**MIS, "mis_mode": "clip"},
    "mis_sequence": {**MIS, "mis_level": "sequence", "mis_upper_bound": 1.2, "mis_veto_threshold": 0.05},
    "mis_geometric": {**MIS, "mis_level": "geometric", "mis_mode": "mask", "mis_veto_threshold": 0.05},
}
VOCAB = 6


class Problem:
    """A batch with a table of logits per response token as the 'model', so that gradients can be compared."""

    def __init__(self, seed: int = 0, samples: int = 9):
        self.batch = random_batch(seed, samples)
        generator = torch.Generator().manual_seed(seed)
        sizes = self.batch["response_lengths"]
        self.logits = [torch.randn(n, VOCAB, generator=generator, dtype=torch.float64) for n in sizes]
        self.targets = [torch.randint(0, VOCAB, (n,), generator=generator) for n in sizes]
        current = [log_probs_from_logits(*pair)[0] for pair in zip(self.logits, self.targets, strict=True)]
        noise = random_tokens(seed + 1, self.batch, 0.3)
        # The engine's log-probs are those of the old policy, more or less.
        mismatch = random_tokens(seed + 3, self.batch, 0.7)
        self.batch["rollout_log_probs"] = [
            (c + n + m).tolist() for c, n, m in zip(current, noise, mismatch, strict=True)
        ]
        self.columns = {
            "log_probs": [c + n for c, n in zip(current, noise, strict=True)],
            "ref_log_probs": [c - 2 * n for c, n in zip(current, noise, strict=True)],
            "advantages": random_tokens(seed + 2, self.batch),
        }

    def run(self, args, per_token=False, **schedule):
        """Sums over micro-batches and ranks: (metrics, gradient of each sample's logits)."""
        leaves = self.leaves()
        totals: dict[str, torch.Tensor] = {}
        for data in rank_data(self.batch, self.columns, **schedule):
            for key, value in self.losses_of(args, data, leaves, per_token).items():
                totals[key] = totals.get(key, 0) + value
        return totals, gradients(leaves)

    def leaves(self) -> list[torch.Tensor]:
        return [x.clone().requires_grad_() for x in self.logits]

    def losses_of(self, args, data, leaves, per_token, cp=ALONE) -> dict[str, torch.Tensor]:
        """Backward through all micro-batches of one rank; the sum of their metrics."""
        totals: dict[str, torch.Tensor] = {}
        for step, micro_batches in enumerate(data.steps):
            for index in range(len(micro_batches)):
                mb = data.micro_batch(step, index)
                row = local_row(mb, cp)
                samples = [i - 100 for i in mb.sample_indices]
                logits = torch.cat([leaves[i] for i in samples]) if samples else torch.zeros(0, VOCAB).double()
                targets = torch.cat([self.targets[i] for i in samples]) if samples else torch.zeros(0).long()
                log_probs, entropy = log_probs_from_logits(
                    row.slice(logits), row.slice(targets), with_entropy=True, entropy_grad=args.entropy_coef != 0
                )
                log_probs, entropy = row.gather(log_probs), row.gather(entropy)
                loss, metrics = compute_loss(args, mb, log_probs, entropy, make_reducer(mb, per_token))
                if args.advantage_estimator == "ppo":
                    # The critic shares the table of logits: its value is the first of them.
                    values = row.gather(row.slice(logits)[:, 0])
                    value_loss, value_metrics = compute_value_loss(args, mb, values, make_reducer(mb, per_token))
                    loss, metrics = loss + value_loss, {**metrics, **value_metrics, "loss": metrics["loss"]}
                if samples:
                    loss.backward()
                for key, value in metrics.items():
                    assert not value.requires_grad
                    totals[key] = totals.get(key, 0) + value
        return totals


def gradients(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
