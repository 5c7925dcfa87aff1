"""Megatron trainer ranks for tests, one layout after the other in the same processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.training.rollout_data import RankData
from tests.backends.trainers import rollout_batch, rollout_parts


def start_trainer(
    args, rank: int, world_size: int, port: int, kind: type[MegatronTrainRayActor] = MegatronTrainRayActor, **init
) -> MegatronTrainRayActor:
    """A trainer rank outside Ray. A process may have several in turn: `stop_trainer` the last before."""
    trainer = kind(world_size, rank)
    if dist.is_initialized():
        trainer.join_world = lambda *_: None
    trainer._store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, wait_for_workers=False)
    trainer.start_rollout_id = trainer.init(args, **init)
    return trainer


def stop_trainer() -> None:
    """Forget the layout, keep the world."""
    from slime.backends.megatron_utils.parallel import destroy_parallel

    destroy_parallel()


def train_rollout(trainer: MegatronTrainRayActor, rollout_id: int, seed: int | None = None) -> dict[str, float]:
    """Train on a random rollout, the same one for every layout."""
    batch = rollout_batch(rollout_id if seed is None else seed)
    part = rollout_parts(trainer.args, batch, dist.get_world_size(trainer.dp_group))[dist.get_rank(trainer.dp_group)]
    return trainer.train_on(rollout_id, RankData(part))


def parameters_of(trainer) -> dict[str, torch.Tensor]:
    """Full parameters under checkpoint names; collective."""
    specs = trainer.weights.tensor_specs()
    out = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    trainer.weights.gather(specs, out)
    return {spec.name: tensor for spec, tensor in zip(specs, out, strict=True)}
