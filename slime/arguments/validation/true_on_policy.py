"""`--true-on-policy-mode`: samples must come from the weights that are trained, by operations that both sides have."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.problems import Problems
from slime.arguments.validation.loops import FULLY_ASYNC


def check(args: Namespace, problems: Problems, asynchronous: bool) -> None:
    """Add a problem for each flag that contradicts the mode."""
    if not args.true_on_policy_mode:
        return
    stale = "trains on samples of older weights, whose log-probs cannot be equal"
    rules = (
        ("--rollout-engine", args.rollout_engine, args.rollout_engine != "embedded", "has kernels of its own"),
        ("--loss-type", args.loss_type, args.loss_type != "policy_loss", "has no log-probs of an engine"),
        ("--partial-rollout", None, args.partial_rollout, stale),
        ("--rollout-function-path", FULLY_ASYNC, args.rollout_function_path == FULLY_ASYNC, stale),
        ("train-async", None, asynchronous, stale),
        (
            "--attn-implementation",
            args.attn_implementation,
            args.attn_implementation == "slime_cudnn",
            "depends on the length of the whole sequence",
        ),
        ("--fsdp-compile", args.fsdp_compile, args.fsdp_compile is not None, "writes kernels of its own"),
        ("--sglang-dtype", args.sglang_dtype, args.sglang_dtype not in (None, args.dtype), "rounds differently"),
    )
    for flag, value, broken, reason in rules:
        if broken:
            problems.add(flag, value, f"contradicts --true-on-policy-mode: it {reason}", "leave one of the two out")
