"""The critic's Megatron rank (PPO): values of a rollout for the policy, and the value loss."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.common import checks
from slime.backends.common.metrics import rollout_means
from slime.backends.megatron_utils.trainer import MegatronTrainer
from slime.training.advantages import compute_advantages
from slime.training.batch import MicroBatch
from slime.training.losses import compute_value_loss
from slime.training.reducers import make_reducer
from slime.training.rollout_data import RankData


class MegatronCriticRayActor(MegatronTrainer):
    """Learns the returns of the policy's samples. Its arguments are those of `slime.ray.roles`."""

    def _forward_of(self, chunks, config, architecture):
        from slime.backends.megatron_utils.forward import ValueForward

        return ValueForward(**self._rows(chunks, config, architecture))

    def train_on(self, rollout_id: int, data: RankData) -> dict[str, float]:
        """Values, returns, optimizer steps. The values are kept for `take_values`."""
        args = self.args
        if args.reset_optimizer_states:
            self.optimizer.reset_state()
        with self.timer("values"):
            values = self._values(data)
        data.set_flat("values", values)
        self._computed = {"values": [value.cpu().numpy() for value in values]}
        compute_advantages(args, data, self.dp_group)
        steps = self._train_steps(rollout_id, data)
        if args.ci_test:
            checks.check_zero("value_clipfrac", steps[0]["value_clipfrac"])
        return self._over_steps(steps) | rollout_means(data, self.dp_group, self.device)

    def take_values(self) -> dict[str, list[Any]]:
        """`{"values": an array per sample}` of this rank's part of the rollout trained on last, from before that."""
        return self._computed

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

    def _perf_metrics(self, data: RankData) -> dict[str, float]:
        """The policy's names stay the policy's."""
        return {
            name if "critic" in name else name.replace("perf/", "perf/critic_"): value
            for name, value in super()._perf_metrics(data).items()
        }
