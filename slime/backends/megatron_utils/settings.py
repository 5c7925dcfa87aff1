"""What the flags mean for Megatron's objects."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from slime.backends.megatron_utils.arguments import given_fields
from slime.backends.megatron_utils.fields import ARCHITECTURE
from slime.backends.megatron_utils.parallel import ParallelSizes


def parallel_sizes(args: Namespace) -> ParallelSizes:
    return ParallelSizes(
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size,
        virtual_pipeline=args.virtual_pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
    )


def config_overrides(args: Namespace) -> dict[str, Any]:
    """Fields of TransformerConfig that flags set, beside parallelism and architecture."""
    fields: dict[str, Any] = {
        "deterministic_mode": args.deterministic_mode,
        # Losses come as their share of the whole step: gradients are summed, never averaged.
        "calculate_per_token_loss": True,
    }
    if args.use_routing_replay or args.use_rollout_routing_replay:
        fields["moe_enable_routing_replay"] = True
    if args.recompute_granularity is not None:
        fields["recompute_granularity"] = args.recompute_granularity
    if args.recompute_method is not None:
        fields |= {"recompute_method": args.recompute_method, "recompute_num_layers": args.recompute_num_layers}
    given = given_fields(args, "ModelParallelConfig", "TransformerConfig")
    return fields | {name: value for name, value in given.items() if name not in ARCHITECTURE}


def ddp_options(args: Namespace) -> dict[str, Any]:
    """Fields of DistributedDataParallelConfig that flags set."""
    return given_fields(args, "DistributedDataParallelConfig")


def optimizer_options(args: Namespace) -> dict[str, Any]:
    """What flags say of the optimizer beside AdamW's own numbers: where it steps, its moments' dtypes, and fields of
    OptimizerConfig."""
    host = args.optimizer_cpu_offload or args.optimizer == "cpu_adam"
    asked = {"exp_avg": args.exp_avg_dtype, "exp_avg_sq": args.exp_avg_sq_dtype}
    narrow = {name: torch.bfloat16 for name, dtype in asked.items() if dtype == "bf16"}
    return {"host": host, "moment_dtypes": narrow, **given_fields(args, "OptimizerConfig")}
