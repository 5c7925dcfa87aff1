"""Users' functions that Megatron trainers call."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from slime.utils.misc import load_hook


def after_init(args: Namespace) -> None:
    """`--custom-megatron-init-path`: `fn(args)`, once Megatron's process groups are there and before models are."""
    if args.custom_megatron_init_path is not None:
        load_hook(args.custom_megatron_init_path, "--custom-megatron-init-path")(args)


def before_log_prob(args: Namespace, model: Sequence[Any], store_prefix: str) -> None:
    """`--custom-megatron-before-log-prob-hook-path`: `fn(args, model, store_prefix)`, before each forward pass for
    log-probs.

    Args:
        model: this rank's chunks, which hold the weights that the pass is of.
        store_prefix: what the pass computes is `{store_prefix}log_probs`: "" for the policy, "ref_", "teacher_".
    """
    path, flag = args.custom_megatron_before_log_prob_hook_path, "--custom-megatron-before-log-prob-hook-path"
    if path is not None:
        load_hook(path, flag)(args, list(model), store_prefix)


def before_train_step(args: Namespace, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any) -> None:
    """`--custom-megatron-before-train-step-hook-path`: `fn(args, rollout_id, step_id, model, optimizer,
    opt_param_scheduler)`, before the gradients of each optimizer step.

    The hook gets Megatron's optimizer and, as scheduler, slime's `LRSchedule`. Rates that it writes into the optimizer
    are overwritten by those of the schedule.
    """
    path, flag = args.custom_megatron_before_train_step_hook_path, "--custom-megatron-before-train-step-hook-path"
    if path is not None:
        load_hook(path, flag)(args, rollout_id, step_id, list(model), optimizer.megatron, optimizer.schedule)


def model_provider(args: Namespace) -> Callable[..., Any] | None:
    """`--custom-model-provider-path`: `fn(pre_process, post_process, vp_stage=None) -> model chunk`."""
    if args.custom_model_provider_path is None:
        return None
    return load_hook(args.custom_model_provider_path, "--custom-model-provider-path")
