"""Samples of a rollout -> the RolloutBatch (a dict of per-sample lists) that the trainers are fed with."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.rollout.errors import HookFailure, blame
from slime.rollout.rm_hub import is_finite
from slime.training.flops import ModelFlops
from slime.training.rewards import normalize_rewards
from slime.training.schedule import DPSchedule, build_dp_schedule
from slime.utils.misc import function_name, load_function
from slime.utils.types import Sample


def trajectory_ids(samples: Sequence[Sample]) -> list[int]:
    """A number per trajectory, from 0: samples with the same `rollout_id` are pieces of one, others stand alone."""
    numbers: dict[Hashable, int] = {}
    keys = (("alone", i) if s.rollout_id is None else s.rollout_id for i, s in enumerate(samples))
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def trim(args: Namespace, samples: list[Sample]) -> list[Sample]:
    """Drop the tail so that the trajectories fill whole optimizer steps.

    Not with `--disable-rollout-trim-samples` or `--use-dynamic-global-batch-size`.

    Raises:
        ValueError: there are fewer trajectories than one step needs.
    """
    ids = trajectory_ids(samples)
    count = len(set(ids))
    if (args.disable_rollout_trim_samples or args.use_dynamic_global_batch_size) and count > 0:
        return samples
    keep = count - count % args.global_batch_size
    if keep == 0:
        raise ValueError(
            f"the rollout has {count} trajectories, fewer than one optimizer step of --global-batch-size "
            f"{args.global_batch_size}: check --rollout-batch-size x --n-samples-per-prompt and the rollout function"
        )
    return [sample for sample, number in zip(samples, ids, strict=True) if number < keep]


def loss_mask(sample: Sample) -> list[int]:
    """1 per response token that is trained on. A removed sample stays in the batch with none.

    Raises:
        ValueError: the mask does not have one entry per response token.
    """
    if sample.remove_sample:
        return [0] * sample.response_length
    if sample.loss_mask is None:
        return [1] * sample.response_length
    if len(sample.loss_mask) != sample.response_length:
        raise ValueError(
            f"sample {sample.index}: loss_mask has {len(sample.loss_mask)} entries for a response of "
            f"{sample.response_length} tokens"
        )
    return sample.loss_mask


def raw_rewards(args: Namespace, samples: Sequence[Sample]) -> list[float]:
    """The scalar reward of each sample; 0 where the loss needs none (SFT).

    Raises:
        ValueError: a sample of an RL run has no reward, or one that is no number.
    """
    needed = args.loss_type == "policy_loss" and args.compute_advantages_and_returns
    values = []
    for sample in samples:
        value = None if sample.reward is None else sample.get_reward_value(args)
        if value is None and not needed:
            value = 0.0
        if not is_finite(value):
            raise ValueError(
                f"sample {sample.index} (group {sample.group_index}, status {sample.status.value}) has the reward "
                f"{sample.reward!r}: a finite number is needed, or a dict with --reward-key"
            )
        values.append(float(value))
    return values


def samples_to_batch(args: Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    """The RolloutBatch of SPEC names; hooks: `--custom-convert-samples-to-train-data-path` replaces it all,
    `--custom-reward-post-process-path` replaces the group normalisation."""
    if args.custom_convert_samples_to_train_data_path:
        convert = load_function(
            args.custom_convert_samples_to_train_data_path, "--custom-convert-samples-to-train-data-path"
        )
        with blame("--custom-convert-samples-to-train-data-path", convert):
            batch = convert(args, samples)
        if not isinstance(batch, dict):
            raise HookFailure(
                f"--custom-convert-samples-to-train-data-path {function_name(convert)} returned {batch!r:.200}, not a "
                "dict of lists"
            )
        return _complete(batch, samples)
    ids = trajectory_ids(samples)
    if args.custom_reward_post_process_path:
        process = load_function(args.custom_reward_post_process_path, "--custom-reward-post-process-path")
        with blame("--custom-reward-post-process-path", process):
            raw, rewards = (list(map(float, values)) for values in process(args, samples))
        if not all(map(is_finite, (*raw, *rewards))):
            raise HookFailure(
                f"--custom-reward-post-process-path {args.custom_reward_post_process_path} returned what is not "
                f"finite: raw {raw!r:.200}, processed {rewards!r:.200}"
            )
        if not len(raw) == len(rewards) == len(samples):
            raise HookFailure(
                f"--custom-reward-post-process-path {args.custom_reward_post_process_path} returned {len(raw)} raw "
                f"and {len(rewards)} processed rewards for {len(samples)} samples"
            )
    else:
        raw = raw_rewards(args, samples)
        relative = args.loss_type == "policy_loss" and args.compute_advantages_and_returns
        rewards = normalize_rewards(args, raw, [s.group_index for s in samples], ids) if relative else raw
    batch: dict[str, list[Any]] = {
        "tokens": [s.tokens for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "truncated": [int(s.truncated) for s in samples],
        "sample_indices": [s.index for s in samples],
        "rollout_ids": ids,
        "loss_masks": [loss_mask(s) for s in samples],
        "prompt": [s.prompt for s in samples],
        "metadata": [s.train_metadata for s in samples],
        "weight_version": _last_versions(samples) if args.keep_old_actor else None,
        "round_number": [s.metadata.get("round_number") for s in samples],
    }
    if args.loss_type != "sft_loss" or any(s.reward is not None for s in samples):
        batch["rewards"] = [float(r) for r in rewards]
        batch["raw_reward"] = [s.metadata.get("raw_reward", r) for s, r in zip(samples, raw, strict=True)]
    for key in ("rollout_log_probs", "teacher_log_probs", "rollout_routed_experts", "multimodal_train_inputs"):
        values = [getattr(s, key) for s in samples]
        if all(value is not None for value in values):
            batch[key] = values
    return batch | _kept_tokens(samples) if args.use_rollout_top_p_replay else batch


def _kept_tokens(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """What top-p left to sample from, for every response token.

    Raises:
        ValueError: a sample with a response has none.
    """
    for sample in samples:
        if sample.rollout_top_p_token_ids is None and sample.response_length:
            raise ValueError(
                f"sample {sample.index} has no rollout_top_p_token_ids: with --use-rollout-top-p-replay the rollout "
                "must ask the engine for them (return_sampling_mask)"
            )
    return {
        "rollout_top_p_token_ids": [s.rollout_top_p_token_ids or [] for s in samples],
        "rollout_top_p_token_offsets": [s.rollout_top_p_token_offsets or [0] for s in samples],
    }


def _last_versions(samples: Sequence[Sample]) -> list[int]:
    """The weights that generated each sample's last tokens; 0 where no engine said."""
    return [int(s.weight_versions[-1]) if s.weight_versions else 0 for s in samples]


def build_schedule(
    args: Namespace, batch: dict[str, list[Any]], dp_size: int, micro_batch_multiple: int = 1
) -> DPSchedule:
    """The batch's optimizer steps and micro-batches.

    With `--use-dynamic-global-batch-size` the trajectories, however many, are spread evenly over the usual number of
    steps (fewer where that would leave a rank without any). With `--balance-by-flops` samples weigh what they cost.
    """
    lengths, ids = batch["total_lengths"], batch["rollout_ids"]
    sizes: dict[str, int] = {"global_batch_size": args.global_batch_size}
    if args.use_dynamic_global_batch_size:
        sizes = {"num_steps": max(min(args.num_steps_per_rollout, len(set(ids)) // dp_size), 1)}
    costs = None
    if args.balance_by_flops:
        config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text(encoding="utf-8"))
        model = ModelFlops.of_hf_config(config)
        costs = [model.forward(length) for length in lengths]
    return build_dp_schedule(
        lengths,
        ids,
        dp_size=dp_size,
        micro_batch_size=args.micro_batch_size,
        max_tokens=args.max_tokens_per_gpu * args.context_parallel_size if args.use_dynamic_batch_size else None,
        balance=args.balance_data or args.balance_by_flops,
        costs=costs,
        micro_batch_multiple=micro_batch_multiple,
        **sizes,
    )


def _complete(batch: dict[str, list[Any]], samples: list[Sample]) -> dict[str, list[Any]]:
    """What the schedule needs and a user's conversion may have left out."""
    missing = {"tokens", "response_lengths"} - batch.keys()
    if missing:
        raise ValueError(f"--custom-convert-samples-to-train-data-path: the dict has no {sorted(missing)}")
    count = len(batch["tokens"])
    same = count == len(samples)
    defaults = {
        "total_lengths": [len(tokens) for tokens in batch["tokens"]],
        "loss_masks": [[1] * length for length in batch["response_lengths"]],
        "rollout_ids": trajectory_ids(samples) if same else list(range(count)),
        "sample_indices": [s.index for s in samples] if same else list(range(count)),
    }
    return {**defaults, **batch}


def batch_metrics(batch: dict[str, list[Any]]) -> dict[str, float]:
    """Means over samples under the names that the trainers' own metrics continue.

    A trajectory counts once in rewards and truncation, however many samples it was split into.
    """
    out = {}
    for key in ("raw_reward", "rewards", "truncated", "response_lengths", "total_lengths"):
        if batch.get(key):
            weights = None if key.endswith("lengths") else trajectory_weights(batch["rollout_ids"])
            out[f"rollout/{key}"] = float(np.average(batch[key], weights=weights))
    return out


def trajectory_weights(ids: Sequence[int]) -> np.ndarray:
    """1 / (number of samples of the same trajectory), per sample."""
    _, which, counts = np.unique(np.asarray(ids), return_inverse=True, return_counts=True)
    return 1.0 / counts[which]
