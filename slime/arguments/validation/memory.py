"""Whether a run fits the GPUs: what cannot is refused with the arithmetic, before anything is launched."""

from __future__ import annotations

import functools
import shutil
import subprocess
from argparse import Namespace

from slime.arguments.problems import Problems
from slime.utils.memory_plan import (
    ENGINE_WORKSPACE,
    GIB,
    MARGIN_TOKENS,
    TRAINER_ASLEEP,
    MemoryPlan,
    ModelSize,
    engine_kv_bytes,
    engine_weight_bytes,
    predict,
    read_size,
)
from slime.utils.served_models import ServedModel, engine_args, policy_model

HOST_STATES = {"fsdp": "--optimizer cpu_adam, --fsdp-cpu-offload", "megatron": "--optimizer-cpu-offload"}


@functools.cache
def gpu_memory() -> int | None:
    """Bytes of the smallest GPU of this machine, by its driver; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=5.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in result.stdout.split() if line.isdigit()]
    return min(sizes) * 1024**2 if sizes else None


def plan_of(args: Namespace, gpu_bytes: int | None) -> MemoryPlan | None:
    """The plan of validated arguments; None where a checkpoint does not tell its size."""
    if args.hf_checkpoint is None:
        return None
    trained = read_size(args.hf_checkpoint)
    if trained is None:
        return None
    return predict(args, trained, _sizes(args, trained), gpu_bytes)


def _sizes(args: Namespace, trained: ModelSize) -> dict[str, ModelSize]:
    """Of the models that this run's own engines serve."""
    if args.rollout_external:
        return {}
    sizes = {
        m.name: trained if m.model_path == args.hf_checkpoint else read_size(m.model_path) for m in args.served_models
    }
    return {name: size for name, size in sizes.items() if size is not None}


def check(args: Namespace, problems: Problems) -> None:
    """On this machine's GPUs; wrong arguments are not multiplied."""
    if args.device != "cuda" or problems:
        return
    gpu_bytes = gpu_memory()
    if gpu_bytes is not None:
        check_on(args, gpu_bytes, problems)


def check_on(args: Namespace, gpu_bytes: int, problems: Problems) -> None:
    """On GPUs of `gpu_bytes`."""
    plan = plan_of(args, gpu_bytes)
    if plan is None:
        return
    sizes = _sizes(args, read_size(args.hf_checkpoint))
    for model in args.served_models:
        if model.name in sizes:
            _check_engines(args, model, sizes[model.name], gpu_bytes, problems)
    if problems:
        return
    for phase in plan.phases:
        if phase.name in ("training", "updating weights") and phase.at_least > gpu_bytes:
            parts = " + ".join(
                f"{name} {phase.parts[name] / GIB:.1f}" for name in phase.parts if name in phase.certain
            )
            problems.add(
                "--actor-num-gpus-per-node",
                args.actor_num_gpus_per_node,
                f"{phase.name} needs {parts} = {phase.at_least / GIB:.1f} GiB on a GPU of {gpu_bytes / GIB:.1f}, "
                "without activations",
                f"train on more GPUs, or keep states in host memory ({HOST_STATES[args.train_backend]})",
            )
            return


def _check_engines(args: Namespace, model: ServedModel, size: ModelSize, gpu_bytes: int, problems: Problems) -> None:
    shares = args.colocate and model.name == policy_model(args).name
    for spec in model.engines():
        own = engine_args(args, model, spec)
        fraction = own.sglang_mem_fraction_static
        if fraction is None:
            continue  # the engine's own choice
        tp = own.rollout_num_gpus_per_engine
        static, weights = fraction * gpu_bytes, engine_weight_bytes(size, own)
        product = f"{fraction:g} x {gpu_bytes / GIB:.1f} GiB = {static / GIB:.1f} GiB"
        shown = f"weights of {weights / GIB:.1f} GiB" + (f" (1/{tp} of the model)" if tp > 1 else "")
        kv_token = engine_kv_bytes(size, own)
        longest = (args.rollout_max_prompt_len or 0) + args.rollout_max_response_len + MARGIN_TOKENS
        beside = TRAINER_ASLEEP if shares else 0.0
        if static < weights:
            rule, fix = f"{product} cannot hold the {shown}", "raise it, or spread the engine over more GPUs"
        elif static - weights < longest * kv_token:
            rule = (
                f"{product} less {shown} leaves {(static - weights) / GIB:.2f} GiB for the KV cache, but one request "
                f"of {longest} tokens needs {longest} x {kv_token} bytes = {longest * kv_token / GIB:.2f} GiB"
            )
            fix = "raise it, or spread the engine over more GPUs"
        elif static + ENGINE_WORKSPACE + beside > gpu_bytes:
            asleep = f" + {beside / GIB:.1f} of the sleeping trainer" if shares else ""
            total = static + ENGINE_WORKSPACE + beside
            rule = (
                f"{product} + {ENGINE_WORKSPACE / GIB:.1f} of workspace and CUDA graphs{asleep} = {total / GIB:.1f} "
                f"GiB do not fit {gpu_bytes / GIB:.1f}"
            )
            fix = f"use at most {int(100 * (gpu_bytes - ENGINE_WORKSPACE - beside) / gpu_bytes) / 100:g}"
        else:
            continue
        problems.add("--sglang-mem-fraction-static", fraction, rule, fix)
        return
