"""What the flags mean for Megatron's objects."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.backends.megatron_utils.parallel import ParallelSizes


def parallel_sizes(args: Namespace) -> ParallelSizes:
    return ParallelSizes(
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel,
    )


def config_overrides(args: Namespace) -> dict[str, Any]:
    """Fields of TransformerConfig that flags set, beside parallelism and architecture."""
    fields: dict[str, Any] = {
        "deterministic_mode": args.deterministic_mode,
        # Losses come as their share of the whole step: gradients are summed, never averaged.
        "calculate_per_token_loss": True,
    }
    if args.recompute_granularity is not None:
        fields["recompute_granularity"] = args.recompute_granularity
    if args.recompute_method is not None:
        fields |= {"recompute_method": args.recompute_method, "recompute_num_layers": args.recompute_num_layers}
    return fields
