"""The command line and environment of a stock SGLang server, from slime's arguments."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.arguments.families.engine import shared_server_flags
from slime.arguments.parser import SERVER_FLAGS
from slime.backends.sglang_utils.arguments import given_words, to_words
from slime.backends.sglang_utils.cpu import CPU_ENGINE, CPU_FLAGS
from slime.utils.checkpoint_files import checkpoint_headers

QUIET_FLAGS = {"log_level_http": "warning"}
"""A line per request would bury what the log is read for."""
CPU_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's own: the cores of each tensor-parallel rank, separated by |."""


def launch_command(
    args: Namespace,
    rank: int,
    host: str,
    node_rank: int = 0,
    nnodes: int = 1,
    dist_init_addr: str | None = None,
) -> list[str]:
    """argv of engine `rank` (of its process on node `node_rank`), without `--port-file` and `--parent-pid`.

    What the user gives as `--sglang-*` beats slime's own choices, which beat SGLang's defaults. SGLang refuses unknown
    flags, so nothing is passed on that was not asked for.
    """
    given = [*given_words(args, SERVER_FLAGS), *given_words(args, shared_server_flags())]
    asked = {word for word in given if word.startswith("--")}
    words: list[str] = []
    for name, value in _own_arguments(args, rank, host, node_rank, nnodes, dist_init_addr).items():
        words += to_words(name, value)
    preferred = {**QUIET_FLAGS, **(CPU_FLAGS if args.device == "cpu" else {})}
    for name, value in preferred.items():
        flag = to_words(name, value)
        if flag[0] not in asked:
            words += flag
    return [sys.executable, "-m", "slime.backends.sglang_utils.launch", *words, *given]


def _own_arguments(
    args: Namespace, rank: int, host: str, node_rank: int, nnodes: int, dist_init_addr: str | None
) -> dict[str, Any]:
    """Server arguments that slime decides; `families.engine.OWNED_BY_SLIME` refuses them on the command line."""
    own: dict[str, Any] = {
        "model_path": args.hf_checkpoint,
        "host": host,
        "dtype": args.sglang_dtype or args.dtype,
        "trust_remote_code": args.trust_remote_code,
        "random_seed": args.seed + rank,
        "tp_size": tensor_parallel_size(args),
        "skip_server_warmup": True,
        # The memory saver is a CUDA library: on CPU releasing is free of effect anyway.
        "enable_memory_saver": args.offload_rollout and args.device == "cuda",
        "enable_return_routed_experts": args.use_rollout_routing_replay,
    }
    if args.lora_sync == "adapter":
        own |= {
            "enable_lora": True,
            "max_lora_rank": args.lora_rank,
            "lora_target_modules": adapted_modules(args),
            "max_loras_per_batch": 2,  # the policy's, and requests for the base
            # Nobody sends the base again after its memory was released.
            "enable_weights_cpu_backup": own["enable_memory_saver"],
        }
    mode = vars(args).get("sglang_disaggregation_mode")  # of a server that does half of each request
    if mode is not None:
        own["disaggregation_mode"] = mode
    if mode == "prefill":
        own["disaggregation_bootstrap_port"] = args.sglang_disaggregation_bootstrap_port
    if nnodes > 1:
        own |= {"nnodes": nnodes, "node_rank": node_rank, "dist_init_addr": dist_init_addr}
    return own


def adapted_modules(args: Namespace) -> list[str]:
    """Names of the modules that get adapters, of those in the checkpoint's decoder layers; `all` also means
    embeddings and the output layer to SGLang."""
    given = args.lora_target_modules
    if given == ["all-linear"]:
        headers = checkpoint_headers(args.hf_checkpoint).items()
        matrices = [name for name, entry in headers if ".layers." in name and len(entry["shape"]) == 2]
        given = sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in matrices})
    return [name for name in given if name not in (args.lora_exclude_modules or ())]


def tensor_parallel_size(args: Namespace) -> int:
    """The engine's GPUs, divided among its pipeline stages."""
    return args.rollout_num_gpus_per_engine // pipeline_size(args)


def pipeline_size(args: Namespace) -> int:
    return vars(args).get("sglang_pp_size") or 1


def launch_env(args: Namespace, gpus: Sequence[str]) -> dict[str, str]:
    """Environment of the server.

    Args:
        gpus: the node's devices that it uses, in tensor-parallel order; empty leaves the process's own.
    """
    # A health check that generates kills a server whose memory is released.
    env = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if args.use_rollout_top_p_replay:
        env["SGLANG_ENABLE_DISAGG_SAMPLING_MASK"] = "1"
    if args.device == "cpu":
        env[CPU_ENGINE] = "1"
        if args.rollout_num_gpus_per_engine > 1 and CPU_CORES not in os.environ:
            # By default SGLang takes no more ranks than the machine has NUMA nodes.
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            env[CPU_CORES] = "|".join([cores] * args.rollout_num_gpus_per_engine)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env
