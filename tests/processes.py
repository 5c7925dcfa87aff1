"""Processes for ranks: forks of one that has imported everything already, which saves seconds for each."""

import multiprocessing
from collections.abc import Callable
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    # Not Megatron: it must be imported after `slime.backends.megatron_utils.compat` has prepared the process.
    ["tests.backends.trainers", "torch.distributed.checkpoint", "transformers.models.qwen3.modeling_qwen3"]
)


def run_ranks(function: Callable[..., None], world_size: int, *args: Any) -> None:
    """`function(rank, *args)` in a process per rank; the first error of a rank is raised here."""
    from torch.multiprocessing import start_processes

    start_processes(function, args, nprocs=world_size, start_method=CONTEXT.get_start_method())
