"""Rules of the two loops: what may overlap, and how old samples may get."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.problems import Problems

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout"
DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"


def check(args: Namespace, problems: Problems, asynchronous: bool) -> None:
    """Completes update_weights_pause_mode. `asynchronous` tells which loop is to run."""
    background = args.rollout_function_path == FULLY_ASYNC
    if asynchronous:
        _check_asynchronous(args, problems)
    elif args.update_weights_interval != 1:
        problems.add(
            "--update-weights-interval",
            args.update_weights_interval,
            "belongs to the asynchronous loop: this one syncs after every rollout",
            "use slime train-async (train_async.py), or leave it out",
        )
    if background:
        _check_background(args, problems)
    if args.update_weights_pause_mode is None:
        keeps_running = background and args.lora_sync == "merged"  # an adapter in use is not replaced
        args.update_weights_pause_mode = "in_place" if keeps_running else "abort"
    if args.max_weight_staleness is not None and args.rollout_function_path == DEFAULT_ROLLOUT:
        _check_default_rollout(args, problems, asynchronous)


def _check_default_rollout(args: Namespace, problems: Problems, asynchronous: bool) -> None:
    if asynchronous:
        problems.add(
            "--max-weight-staleness",
            args.max_weight_staleness,
            "the default rollout function does not know how far ahead of the trainers it generates",
            f"use --rollout-function-path {FULLY_ASYNC}, or slime train",
        )
    elif not args.partial_rollout:
        problems.add(
            "--max-weight-staleness",
            args.max_weight_staleness,
            "has no effect: without --partial-rollout no sample outlives its rollout",
            "leave it out, or add --partial-rollout",
        )


def _check_asynchronous(args: Namespace, problems: Problems) -> None:
    reason = "the asynchronous loop generates while it trains, so engines and trainers need devices of their own"
    for flag, given in (
        ("--colocate", args.colocate),
        ("--offload-train", args.offload_train),
        ("--offload-rollout", args.offload_rollout),
    ):
        if given and not (args.colocate and flag != "--colocate"):
            problems.add(flag, None, reason, "give the engines theirs with --rollout-num-gpus, or use slime train")
    interval = args.update_weights_interval
    if args.eval_interval is not None and interval > 0 and args.eval_interval % interval:
        problems.add(
            "--eval-interval",
            args.eval_interval,
            f"must be a multiple of --update-weights-interval {interval}: an evaluation measures the weights that the "
            "engines hold",
            f"use {max(1, round(args.eval_interval / interval)) * interval}, for example",
        )


def _check_background(args: Namespace, problems: Problems) -> None:
    if args.colocate or args.offload_rollout:
        problems.add(
            "--colocate" if args.colocate else "--offload-rollout",
            None,
            f"{FULLY_ASYNC} generates while the trainers train, so its engines can give nothing back",
            "give the engines devices of their own with --rollout-num-gpus",
        )
    if args.partial_rollout:
        problems.add(
            "--partial-rollout",
            None,
            f"has no meaning with {FULLY_ASYNC}, which interrupts nothing at the end of a rollout",
            "leave it out; --max-weight-staleness bounds the age of samples",
        )
