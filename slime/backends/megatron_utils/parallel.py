"""How many ranks each kind of parallelism has, and Megatron's process groups for them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch.distributed as dist

from slime.backends.megatron_utils.groups import ReleasableGroups
from slime.training.context_parallel import ContextParallel


@dataclass(frozen=True)
class ParallelSizes:
    """Ranks per dimension; data parallelism takes what is left of the world."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    virtual_pipeline: int | None = None
    sequence_parallel: bool = False

    @property
    def model(self) -> int:
        """Ranks that hold one copy of the (dense) model and share a micro-batch."""
        return self.tensor * self.pipeline * self.context

    def data(self, world_size: int) -> int:
        return world_size // self.model


def init_parallel(
    sizes: ParallelSizes, seed: int, timeout_minutes: float, groups: ReleasableGroups | None = None
) -> None:
    """Make Megatron's groups (collective), in `groups` if they shall be releasable, and seed its random states."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with groups.making() if groups else nullcontext():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            distributed_timeout_minutes=int(timeout_minutes),
            create_gloo_process_groups=False,
        )
    model_parallel_cuda_manual_seed(seed)


def destroy_parallel() -> None:
    """Forget the groups and random states of `init_parallel`."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    parallel_state.destroy_model_parallel()
    get_cuda_rng_tracker().reset()


def context_parallel() -> ContextParallel:
    """This rank's place in its context-parallel group."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    return ContextParallel.of(group) if dist.get_world_size(group) > 1 else ContextParallel()
