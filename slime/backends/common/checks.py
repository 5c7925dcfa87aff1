"""What must be exactly zero (`--ci-test`, `--true-on-policy-mode`), and the error that names what is not."""

from __future__ import annotations

from argparse import Namespace

import torch

from slime.training.rollout_data import RankData


class InvariantError(AssertionError):
    """A value that must be exactly zero is not."""


def check_first_step(args: Namespace, metrics: dict[str, float], data: RankData, fresh_reference: bool) -> None:
    """Check the metrics of a rollout's first optimizer step.

    The same weights on the same micro-batches give the same log-probs bit for bit, so the policy has not moved from
    the old one and, with `fresh_reference` (no update done yet), not from the reference either.

    Raises:
        InvariantError: names the value.
    """
    if args.loss_type != "policy_loss":
        return
    if not args.use_rollout_logprobs:
        check_zero("ppo_kl", metrics["ppo_kl"])
        check_zero("pg_clipfrac", metrics["pg_clipfrac"])
    if not fresh_reference or args.ci_disable_kl_checker:
        return
    if "kl_loss" in metrics:
        check_zero("kl_loss", metrics["kl_loss"])
    if "ref_log_probs" not in data or "log_probs" not in data:
        return
    for index, (ours, ref) in enumerate(zip(data["log_probs"], data["ref_log_probs"], strict=True)):
        if not torch.equal(ours, ref):
            token = int((ours != ref).nonzero()[0])
            raise InvariantError(
                f"--ci-test: before the first update log_probs must equal ref_log_probs, but token {token} of sample "
                f"{data.get('sample_indices', range(data.num_samples))[index]} has {ours[token].item()!r} and "
                f"{ref[token].item()!r}"
            )


def check_on_policy(steps: list[dict[str, float]]) -> None:
    """`--true-on-policy-mode`: the trainer's log-probs are the engine's, bit for bit, in every step.

    Raises:
        InvariantError: they differ, or the samples came without the engine's log-probs.
    """
    name = "train_rollout_logprob_abs_diff"
    for index, metrics in enumerate(steps):
        if name not in metrics:
            raise InvariantError("--true-on-policy-mode: the rollout has no rollout_log_probs to compare with")
        if metrics[name] != 0:
            raise InvariantError(
                f"--true-on-policy-mode: train/{name} must be exactly 0, but is {metrics[name]!r} in step {index}: "
                "the samples are not from these weights, or the model has an operation that depends on the batch"
            )


def check_zero(name: str, value: float) -> None:
    """A metric of a first step.

    Raises:
        InvariantError: it is not 0.
    """
    if value != 0:
        raise InvariantError(f"--ci-test: {name} must be exactly 0 in the first step, but is {value!r}")
