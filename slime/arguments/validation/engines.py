"""Which inference engine runs, and what it asks of the other flags."""

from __future__ import annotations

import logging
from argparse import Namespace

from slime.arguments import pending
from slime.arguments.families.engine import INSTALL_SGLANG
from slime.arguments.parser import SERVER_FLAGS
from slime.arguments.problems import Problems
from slime.backends.sglang_utils import compat

logger = logging.getLogger(__name__)


def choose(args: Namespace, problems: Problems) -> None:
    """rollout_engine."""
    if args.rollout_engine is None:
        args.rollout_engine = "sglang" if args.device == "cuda" and compat.installed_version() else "embedded"


def complete(args: Namespace, problems: Problems) -> None:
    """sglang_mem_fraction_static; rules of engines over several GPUs."""
    version = compat.installed_version()
    if args.rollout_engine == "sglang":
        _check_sglang(args, version, problems)
    else:
        _check_embedded(args, problems)
    if args.sglang_mem_fraction_static is None:
        if args.rollout_engine == "embedded":
            args.sglang_mem_fraction_static = 0.6 if args.colocate else 0.85
        elif args.colocate and args.device == "cuda":
            args.sglang_mem_fraction_static = 0.6


def _check_embedded(args: Namespace, problems: Problems) -> None:
    if args.rollout_num_gpus_per_engine > 1:
        problems.add(
            "--rollout-num-gpus-per-engine",
            args.rollout_num_gpus_per_engine,
            f"not available yet: {pending.TENSOR_PARALLEL_ENGINE}",
            f"use 1; several engines share the load; or add --rollout-engine sglang ({INSTALL_SGLANG})",
        )
    for flag in SERVER_FLAGS:
        value = getattr(args, flag.dest)
        if value != flag.default:
            problems.add(flag.name, value, "is an argument of SGLang's server", "add --rollout-engine sglang")


def _check_sglang(args: Namespace, version: str | None, problems: Problems) -> None:
    if version is None:
        if not args.debug_train_only:
            problems.add("--rollout-engine", "sglang", "SGLang is not installed", INSTALL_SGLANG)
        return
    warning = compat.version_warning(version)
    if warning:
        logger.warning(warning)
    if args.sglang_enable_deterministic_inference:
        _check_deterministic(args, problems)
    drafts = vars(args).get("sglang_speculative_algorithm")
    if drafts and args.device == "cpu":
        rule = "needs a GPU: SGLang has no verification of draft tokens on CPU"
        problems.add("--sglang-speculative-algorithm", drafts, rule, "leave it out")
    sizes = {group.num_gpus_per_engine for model in args.served_models for group in model.groups}
    for size in sorted(sizes or {args.rollout_num_gpus_per_engine}):
        _check_size(args, size, problems)


def _check_size(args: Namespace, size: int, problems: Problems) -> None:
    per_node = args.num_gpus_per_node
    if size > per_node and size % per_node:
        problems.add(
            "--rollout-num-gpus-per-engine",
            size,
            f"an engine over several nodes takes whole ones: must be a multiple of --num-gpus-per-node {per_node}",
        )
    pipeline = vars(args).get("sglang_pp_size") or 1
    if size % pipeline:
        problems.add("--rollout-num-gpus-per-engine", size, f"must be a multiple of --sglang-pp-size {pipeline}")
    by_group = args.update_weight_transport == "nccl" and args.lora_sync == "merged"
    if pipeline > 1 and by_group and not (args.colocate or args.debug_rollout_only or args.debug_train_only):
        rule = "cannot take weights over a process group: SGLang gives all stages the same places in it"
        problems.add("--sglang-pp-size", pipeline, rule, "leave it out, or add --update-weight-transport disk")
    data_parallel = vars(args).get("sglang_dp_size") or 1
    attention = vars(args).get("sglang_enable_dp_attention") or (vars(args).get("sglang_attn_dp_size") or 1) > 1
    if data_parallel > 1 and not attention:
        problems.add(
            "--sglang-dp-size",
            data_parallel,
            "replicas inside one server cannot take weight updates",
            "use more engines, or add --sglang-enable-dp-attention",
        )
    elif data_parallel > 1 and size % data_parallel:
        problems.add("--rollout-num-gpus-per-engine", size, f"must be a multiple of --sglang-dp-size {data_parallel}")


def _check_deterministic(args: Namespace, problems: Problems) -> None:
    """SGLang's batch-invariant operations and seeded sampling are GPU kernels, and only some attention has them."""
    flag = "--sglang-enable-deterministic-inference"
    if args.device == "cpu":
        rule = "needs a GPU: SGLang has no batch-invariant operations on CPU"
        problems.add(flag, None, rule, "use --rollout-engine embedded, which always samples by seed and position")
        return
    known, chosen = compat.deterministic_attention_backends(), vars(args).get("sglang_attention_backend")
    if known and chosen is not None and chosen not in known:
        rule = f"is not deterministic, against {flag}"
        problems.add("--sglang-attention-backend", chosen, rule, f"use one of {', '.join(known)}, or leave it out")
