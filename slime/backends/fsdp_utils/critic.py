"""The critic's trainer rank (PPO): values of a rollout for the policy, and the value loss."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.common import checks
from slime.backends.common.metrics import rollout_means
from slime.backends.fsdp_utils.model import build_policy
from slime.backends.fsdp_utils.trainer import FSDPTrainer
from slime.backends.fsdp_utils.value_model import ValueModel
from slime.training.advantages import compute_advantages
from slime.training.batch import MicroBatch
from slime.training.losses import LossOutput, compute_value_loss
from slime.training.reducers import make_reducer
from slime.training.rollout_data import RankData


class FSDPCriticRayActor(FSDPTrainer):
    """Learns the returns of the policy's samples. Its arguments are those of `slime.ray.roles`."""

    def _build(self, path: str) -> ValueModel:
        return build_policy(self._model_options(path), self.mesh, self.device, self.cp, ValueModel)

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
        with self.timer("critic_train"):
            steps = [self._train_step(data, step) for step in range(len(data.steps))]
        if args.ci_test:
            checks.check_zero("value_clipfrac", steps[0]["value_clipfrac"])
        return self._over_steps(steps) | rollout_means(data, self.dp_group, self.device)

    def take_values(self) -> dict[str, list[Any]]:
        """`{"values": an array per sample}` of this rank's part of the rollout trained on last, from before that."""
        return self._computed

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

    def _perf_metrics(self, data: RankData) -> dict[str, float]:
        """The policy's names stay the policy's."""
        return {
            name if "critic" in name else name.replace("perf/", "perf/critic_"): value
            for name, value in super()._perf_metrics(data).items()
        }
