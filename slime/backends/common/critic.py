"""What a critic's rank does (PPO), whatever its backend: values of a rollout for the policy, and the value loss."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.common import checks
from slime.backends.common.metrics import rollout_means
from slime.backends.common.trainer import Trainer
from slime.training.advantages import compute_advantages
from slime.training.rollout_data import RankData


class CriticRole(Trainer):
    """Learns the returns of the policy's samples. Its arguments are those of `slime.ray.roles`."""

    def _values(self, data: RankData) -> list[torch.Tensor]:
        """Per sample the values (response_length,) that the model gives now, without gradients."""
        raise NotImplementedError

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

    def _perf_metrics(self, data: RankData) -> dict[str, float]:
        """The policy's names stay the policy's; `perf/critic_train_time` is that of the optimizer steps."""
        metrics = super()._perf_metrics(data)
        del metrics["perf/train_time"]
        return {
            name if "critic" in name else name.replace("perf/", "perf/critic_"): value
            for name, value in metrics.items()
        }
