"""Devices, and how many processes run on them."""

from __future__ import annotations

import glob
import logging
import shutil
import subprocess
from argparse import Namespace

from slime.arguments.problems import Problems
from slime.utils.served_models import policy_model

logger = logging.getLogger(__name__)


def cuda_present() -> bool:
    """Whether an NVIDIA GPU answers on this machine; asks the driver, not torch."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=1.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0 and "GPU" in result.stdout


def complete_devices(args: Namespace, problems: Problems) -> None:
    """device, dtype, distributed_backend."""
    if args.device == "auto":
        args.device = "cuda" if cuda_present() else "cpu"
    if args.bf16 and args.dtype not in (None, "bfloat16"):
        problems.add("--dtype", args.dtype, "contradicts --bf16", "give one of the two")
    if args.dtype is None:
        args.dtype = "bfloat16" if args.bf16 or args.device == "cuda" else "float32"
    args.bf16 = args.dtype == "bfloat16"
    if args.distributed_backend is None:
        args.distributed_backend = "nccl" if args.device == "cuda" else "gloo"
    elif args.distributed_backend == "nccl" and args.device == "cpu":
        problems.add("--distributed-backend", "nccl", "needs --device cuda", "use gloo, or leave it out")


def complete_sizes(args: Namespace, problems: Problems) -> None:
    """Who gets how many GPUs, and what is offloaded."""
    _complete_offload(args, problems)
    actor = args.actor_num_nodes * args.actor_num_gpus_per_node
    _complete_external(args, problems)
    if actor % args.context_parallel_size and not args.debug_rollout_only:
        problems.add(
            "--context-parallel-size",
            args.context_parallel_size,
            f"must divide the {actor} trainer GPUs (--actor-num-nodes x --actor-num-gpus-per-node)",
        )
    if args.served_models:
        _take_from_groups(args, actor, problems)
    if args.debug_train_only:
        args.colocate = args.offload_train = args.offload_rollout = False
        args.rollout_num_gpus = 0
    elif args.debug_rollout_only:
        _size_for_rollout_only(args, actor, problems)
    elif args.sglang_config is not None:
        return  # taken from there, or it is wrong
    elif args.colocate:
        if args.rollout_num_gpus not in (None, actor):
            logger.warning(
                "--rollout-num-gpus %d is replaced by the trainers' %d GPUs under --colocate",
                args.rollout_num_gpus,
                actor,
            )
        args.rollout_num_gpus = actor
    elif not args.rollout_num_gpus:
        problems.add(
            "--rollout-num-gpus",
            args.rollout_num_gpus,
            "is required without --colocate",
            "give the GPUs of the inference engines, or share the trainers' with --colocate",
        )
        return
    per_engine = args.rollout_num_gpus_per_engine
    if args.rollout_num_gpus and args.rollout_num_gpus % per_engine and not problems.concern("--rollout-num-gpus"):
        problems.add(
            "--rollout-num-gpus",
            args.rollout_num_gpus,
            f"must be a multiple of --rollout-num-gpus-per-engine {per_engine}",
        )


def _take_from_groups(args: Namespace, actor: int, problems: Problems) -> None:
    """With --sglang-config the GPUs of the engines are those of its groups."""
    total, flag = sum(model.num_gpus for model in args.served_models), "--rollout-num-gpus"
    if args.rollout_num_gpus not in (None, total):
        rule = f"is not the {total} GPUs of the groups in --sglang-config"
        problems.add(flag, args.rollout_num_gpus, rule, f"leave it out, or give {total}")
    args.rollout_num_gpus = total
    policy = policy_model(args)
    if args.colocate and not args.debug_rollout_only and policy.num_gpus != actor:
        problems.add(
            "--sglang-config",
            args.sglang_config,
            f"model {policy.name} has {policy.num_gpus} GPUs, but under --colocate it shares the trainers' {actor}",
            "make them equal; a group of worker_type placeholder keeps GPUs free of engines",
        )


def _complete_external(args: Namespace, problems: Problems) -> None:
    """Engines that run already have a count of their own."""
    flag, addresses = "--rollout-external-engine-addrs", args.rollout_external_engine_addrs
    if not args.rollout_external:
        if addresses:
            problems.add(flag, addresses, "has no effect without --rollout-external", "add it")
        return
    if not addresses:
        problems.add("--rollout-external", None, f"needs {flag}", "give host:port of each engine")
        return
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or "/" in address or not port.isdigit() or not 0 < int(port) < 65536:
            problems.add(flag, address, "is not host:port")
        elif addresses.count(address) > 1:
            problems.add(flag, address, "is given twice")
            break
    for other, given in (
        ("--colocate", args.colocate),
        ("--offload-rollout", args.offload_rollout),
        ("--use-fault-tolerance", args.use_fault_tolerance),
    ):
        if given:
            problems.add("--rollout-external", None, f"excludes {other}: the engines are not the run's own")
    args.rollout_num_gpus = len(addresses) * args.rollout_num_gpus_per_engine


def _complete_offload(args: Namespace, problems: Problems) -> None:
    for flag, dest in (("--offload-train", "offload_train"), ("--offload-rollout", "offload_rollout")):
        if args.offload and getattr(args, dest) is False:
            problems.add("--offload", None, f"contradicts --no-{flag[2:]}", "give one of the two")
        if getattr(args, dest) is None:
            setattr(args, dest, args.offload or args.colocate)
    del args.offload


def _size_for_rollout_only(args: Namespace, actor: int, problems: Problems) -> None:
    """Engines alone: the trainers' sizes follow from the engines' GPUs."""
    if args.rollout_num_gpus is None and args.colocate:
        args.rollout_num_gpus = actor
    if not args.rollout_num_gpus:
        problems.add("--rollout-num-gpus", args.rollout_num_gpus, "is required with --debug-rollout-only")
        return
    per_node = min(args.num_gpus_per_node, args.rollout_num_gpus)
    if args.rollout_num_gpus % per_node:
        problems.add(
            "--rollout-num-gpus", args.rollout_num_gpus, f"must be a multiple of --num-gpus-per-node {per_node}"
        )
    args.actor_num_gpus_per_node = per_node
    args.actor_num_nodes = args.rollout_num_gpus // per_node
    args.colocate = args.offload_train = args.offload_rollout = False
