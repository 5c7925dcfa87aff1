"""The critic's Megatron rank."""

from __future__ import annotations

import torch

from slime.backends.common.critic import CriticRole
from slime.backends.megatron_utils.trainer import MegatronTrainer
from slime.training.batch import MicroBatch
from slime.training.losses import compute_value_loss
from slime.training.reducers import make_reducer
from slime.training.rollout_data import RankData


class MegatronCriticRayActor(CriticRole, MegatronTrainer):
    """Learns the returns of the policy's samples."""

    def _forward_of(self, chunks, config, architecture):
        from slime.backends.megatron_utils.forward import ValueForward

        return ValueForward(**self._rows(chunks, config, architecture))

    @torch.no_grad()
    def _values(self, data: RankData) -> list[torch.Tensor]:
        batches, order = self._all_batches(data)

        def keep(index: int, batch: MicroBatch, values_R: torch.Tensor):
            return values_R.new_zeros(()), batch.split(values_R)

        kept = self.forward(batches, keep, backward=False)
        return self._by_sample(data, order, [value for values in kept for value in values])

    def _backward(self, batches: list[MicroBatch], data: RankData, step: int) -> list[dict[str, torch.Tensor]]:
        def result(index: int, batch: MicroBatch, values_R: torch.Tensor):
            reduce = make_reducer(batch, self.args.calculate_per_token_loss)
            return compute_value_loss(self.args, batch, values_R, reduce)

        return self.forward(batches, result, backward=True)
