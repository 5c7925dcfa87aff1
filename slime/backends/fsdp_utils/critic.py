"""The critic's FSDP rank."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.common.critic import CriticRole
from slime.backends.fsdp_utils.model import build_policy
from slime.backends.fsdp_utils.trainer import FSDPTrainer
from slime.backends.fsdp_utils.value_model import ValueModel
from slime.training.batch import MicroBatch
from slime.training.losses import LossOutput, compute_value_loss
from slime.training.reducers import make_reducer
from slime.training.rollout_data import RankData


class FSDPCriticRayActor(CriticRole, FSDPTrainer):
    """Learns the returns of the policy's samples."""

    def _load(self, path: str) -> ValueModel:
        return build_policy(self._model_options(path), self.mesh, self.device, self.cp, ValueModel)

    @torch.no_grad()
    def _values(self, data: RankData) -> list[torch.Tensor]:
        values: list[Any] = [None] * data.num_samples
        self.model.free_unsharded()
        for step, micro_batches in enumerate(data.steps):
            for index, samples in enumerate(micro_batches):
                batch = data.micro_batch(step, index, self.device)
                for sample, value in zip(samples, batch.split(self.model(batch)), strict=True):
                    values[sample] = value
        self.model.free_unsharded()
        return values

    def _loss(self, batch: MicroBatch, samples: list[int]) -> LossOutput:
        reduce = make_reducer(batch, self.args.calculate_per_token_loss)
        return compute_value_loss(self.args, batch, self.model(batch), reduce)
