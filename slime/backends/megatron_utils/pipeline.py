"""What the last pipeline stage knows, on every stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def is_last_stage() -> bool:
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def object_from_last_stage(value: Any) -> Any:
    """`value` of the last stage; what other stages give is ignored. Collective over the pipeline group."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    box = [value]
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]


def samples_from_last_stage(
    values: list[torch.Tensor | None], lengths: list[int], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One tensor [length] per sample, of which only the last stage has the values. Collective."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return values
    flat = torch.cat(values) if is_last_stage() else torch.empty(sum(lengths), dtype=dtype, device=device)
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(flat, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return list(flat.split(lengths))
