"""Engines, router, trackers, dumps, the run directory."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import time
from argparse import Namespace

from slime.arguments.families import FLAGS
from slime.arguments.parser import BY_DEST
from slime.arguments.problems import Problems
from slime.arguments.validation.checkpoints import check_template, check_writable

logger = logging.getLogger(__name__)


def _check_profiling(args: Namespace, problems: Problems) -> None:
    if args.profile_step_end <= args.profile_step_start:
        rule = f"must be greater than --profile-step-start {args.profile_step_start}"
        problems.add("--profile-step-end", args.profile_step_end, rule)
    if "train_overall" in args.profile_target and len(args.profile_target) > 1:
        rule = "train_overall contains the others, and profiles cannot be nested"
        problems.add("--profile-target", " ".join(args.profile_target), rule, "give it alone, or leave it out")
    if args.record_memory_history and args.memory_recorder == "torch" and args.device == "cpu":
        rule = "records the memory of a GPU"
        problems.add("--record-memory-history", None, rule, "add --memory-recorder memray, which records the host's")
    if args.memory_recorder == "memray" and not args.record_memory_history:
        problems.add("--memory-recorder", "memray", "has no effect without --record-memory-history", "add it")
    elif args.memory_recorder == "memray" and importlib.util.find_spec("memray") is None:
        problems.add("--memory-recorder", "memray", "memray is not installed", "pip install 'slime[memray]'")
    if args.memory_snapshot_num_steps is not None and not args.record_memory_history:
        problems.add(
            "--memory-snapshot-num-steps",
            args.memory_snapshot_num_steps,
            "has no effect without --record-memory-history",
            "add it",
        )


def complete_debug(args: Namespace, problems: Problems) -> None:
    """Which halves of the loop run, what is dumped and profiled."""
    _check_profiling(args, problems)
    if args.load_debug_rollout_data is not None:
        args.debug_train_only = True
        _check_dump_source(args.load_debug_rollout_data, problems)
    elif args.load_debug_rollout_data_subsample is not None:
        problems.add(
            "--load-debug-rollout-data-subsample",
            args.load_debug_rollout_data_subsample,
            "has no effect without --load-debug-rollout-data",
            "add it",
        )
    if args.debug_train_only and args.debug_rollout_only:
        other = "--load-debug-rollout-data" if args.load_debug_rollout_data else "--debug-train-only"
        problems.add("--debug-rollout-only", None, f"excludes {other}", "give one of the two")
    if args.dump_details is not None:
        for flag, name in (("rollout", "{rollout_id}.pt"), ("train", "{rollout_id}_{rank}.pt")):
            dest = f"save_debug_{flag}_data"
            if getattr(args, dest) is None:
                setattr(args, dest, os.path.join(args.dump_details, f"{flag}_data", name))
    for flag, known in (("rollout", {"rollout_id"}), ("train", {"rollout_id", "rank"})):
        template = getattr(args, f"save_debug_{flag}_data")
        if template is not None:
            check_template(f"--save-debug-{flag}-data", template, known, required=known, problems=problems)


def _check_dump_source(template: str, problems: Problems) -> None:
    check_template("--load-debug-rollout-data", template, {"rollout_id"}, required=set(), problems=problems)
    folder = os.path.dirname(template) or "."
    if not os.path.isdir(folder):
        problems.add("--load-debug-rollout-data", template, f"there is no directory {folder}")
    elif "{" not in template and not os.path.isfile(template):
        problems.add("--load-debug-rollout-data", template, "is not a file")


def complete(args: Namespace, problems: Problems) -> None:
    """Router address, trackers, run directory."""
    if args.ci_disable_kl_checker and not args.ci_test:
        problems.add("--ci-disable-kl-checker", None, "has no effect without --ci-test", "add it")
    if args.use_wandb and args.wandb_mode != "disabled" and importlib.util.find_spec("wandb") is None:
        problems.add("--use-wandb", None, "wandb is not installed", 'pip install "slime[wandb]"')
    for switch, prefix in (
        ("use_wandb", "wandb_"),
        ("use_tensorboard", "tb_"),
        ("use_fault_tolerance", "rollout_health_check_"),
    ):
        idle = [f.name for f in FLAGS if f.dest.startswith(prefix) and getattr(args, f.dest) != f.default]
        if idle and not getattr(args, switch):
            logger.warning("%s: no effect without %s", ", ".join(idle), BY_DEST[switch].name)
    if args.run_dir is None:
        model = os.path.basename(os.path.normpath(args.hf_checkpoint or "model"))
        args.run_dir = os.path.join("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}-{model}")
    check_writable("--run-dir", args.run_dir, problems)
