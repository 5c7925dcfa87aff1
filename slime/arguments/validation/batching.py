"""Samples per rollout and per optimizer step."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.problems import Problems
from slime.arguments.validation.model import read_hf_config
from slime.training.flops import ModelFlops


def complete(args: Namespace, problems: Problems) -> None:
    """global_batch_size, num_steps_per_rollout, over_sampling_batch_size, token caps."""
    if args.rollout_batch_size is None:
        if not problems.concern("--rollout-batch-size"):
            problems.add("--rollout-batch-size", None, "is required", "give the number of prompts per rollout")
    elif not problems.concern("--n-samples-per-prompt", "--global-batch-size", "--num-steps-per-rollout"):
        _complete_steps(args, problems)
        _complete_over_sampling(args, problems)
    _check_token_caps(args, problems)
    _check_flops(args, problems)
    if args.num_rollout is None and args.num_epoch is None and not problems.concern("--num-rollout", "--num-epoch"):
        problems.add("--num-rollout", None, "or --num-epoch is required", "give the number of rollouts")
    if args.num_rollout is None and args.num_epoch is not None and not args.rollout_global_dataset:
        problems.add("--num-epoch", args.num_epoch, "needs a prompt data set", "use --num-rollout")
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        problems.add("--mask-offpolicy-in-partial-rollout", None, "needs --partial-rollout", "add it")


def _complete_steps(args: Namespace, problems: Problems) -> None:
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    product = f"{args.rollout_batch_size} x {args.n_samples_per_prompt} = {samples} samples per rollout"
    steps, gbs = args.num_steps_per_rollout, args.global_batch_size
    if steps is not None and samples % steps:
        problems.add("--num-steps-per-rollout", steps, f"does not divide {product}", _nearby(samples, steps))
        return
    if steps is not None and gbs is not None and gbs != samples // steps:
        problems.add(
            "--global-batch-size",
            gbs,
            f"contradicts --num-steps-per-rollout {steps}: {product}, {samples // steps} per step",
            f"leave one of them out, or use --global-batch-size {samples // steps}",
        )
        return
    if gbs is None:
        gbs = samples // (steps or 1)
    if samples % gbs:
        problems.add("--global-batch-size", gbs, f"must divide {product}", _nearby(samples, gbs))
        return
    ranks = args.actor_num_nodes * args.actor_num_gpus_per_node // args.context_parallel_size
    if gbs < ranks and not args.debug_rollout_only:
        problems.add(
            "--global-batch-size",
            gbs,
            f"is less than the {ranks} data-parallel ranks, so some would have nothing to train on",
            "raise it, or lower --actor-num-gpus-per-node",
        )
    args.global_batch_size = gbs
    args.num_steps_per_rollout = samples // gbs


def _nearby(total: int, wanted: int) -> str:
    divisor = min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: abs(d - wanted))
    return f"use {divisor}, for example"


def _complete_over_sampling(args: Namespace, problems: Problems) -> None:
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    elif args.over_sampling_batch_size < args.rollout_batch_size:
        problems.add(
            "--over-sampling-batch-size",
            args.over_sampling_batch_size,
            f"must be at least --rollout-batch-size {args.rollout_batch_size}",
            "raise it, or leave it out",
        )


def _check_flops(args: Namespace, problems: Problems) -> None:
    if not args.balance_by_flops or args.hf_checkpoint is None or problems.concern("--hf-checkpoint"):
        return
    try:
        ModelFlops.of_hf_config(read_hf_config(args.hf_checkpoint, "--hf-checkpoint", problems) or {})
    except ValueError as error:
        problems.add("--balance-by-flops", None, str(error), "use --balance-data")


def _check_token_caps(args: Namespace, problems: Problems) -> None:
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        if not problems.concern("--max-tokens-per-gpu"):
            problems.add("--use-dynamic-batch-size", None, "needs --max-tokens-per-gpu", "add it, 8192 for example")
        return
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        problems.add(
            "--max-tokens-per-gpu",
            args.max_tokens_per_gpu,
            "only counts with --use-dynamic-batch-size",
            "add --use-dynamic-batch-size",
        )
    if args.log_probs_max_tokens_per_gpu not in (None, args.max_tokens_per_gpu):
        problems.add(
            "--log-probs-max-tokens-per-gpu",
            args.log_probs_max_tokens_per_gpu,
            f"must equal --max-tokens-per-gpu {args.max_tokens_per_gpu}: both passes share their micro-batches",
            "leave it out",
        )
    args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
