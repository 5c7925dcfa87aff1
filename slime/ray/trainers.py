"""Policy and critic as one trainer for the loop: who is on the devices when, and what one hands to the other."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from slime.ray.roles import role_args

if TYPE_CHECKING:
    import ray

    from slime.ray.actor_group import RayTrainGroup
    from slime.ray.session import Session


class Trainers:
    """The policy's ranks and, with PPO, the critic's, which take turns on the same devices.

    Rank r of one works on the same part of a rollout as rank r of the other, so what they exchange goes from process
    to process, never through the driver.
    """

    def __init__(self, actor: RayTrainGroup, critic: RayTrainGroup | None, session: Session) -> None:
        self.actor = actor
        self.critic = critic
        self.session = session

    def init(self, args: Namespace) -> int:
        """Build the models, resume; returns the first rollout id."""
        wait = self.session.wait
        self.args = args
        with_ref = args.use_kl_loss or args.kl_coef != 0
        start = wait(self.actor.async_init(role_args(args, "actor"), with_ref=with_ref))[0]
        if self.critic is not None:
            self._offload(self.actor)
            wait(self.critic.async_init(role_args(args, "critic")))
            self._offload(self.critic)
            self._onload(self.actor)
        return start

    def train(self, rollout_id: int, refs: list[ray.ObjectRef]) -> dict[str, Any]:
        """Train on a rollout; metrics of both. The policy is left on the devices."""
        args, wait = self.args, self.session.wait
        if self.critic is None:
            metrics = self._onload(self.actor)
            return metrics | wait(self.actor.async_train(rollout_id, refs))[0]
        shared: list[list[ray.ObjectRef]] = []
        if args.kl_coef != 0:  # returns contain the KL penalty
            self._onload(self.actor)
            shared.append(self.actor.call("compute_log_probs", refs))
            self._offload(self.actor)
        metrics = self._onload(self.critic)
        metrics |= _of_critic(wait(self.critic.async_train(rollout_id, refs, shared))[0])
        values = self.critic.call("take_values")
        self._offload(self.critic)
        if not args.critic_train_only and rollout_id >= args.num_critic_only_steps:
            self._onload(self.actor)
            metrics |= wait(self.actor.async_train(rollout_id, refs, [*shared, values]))[0]
        return metrics

    def save_model(self, rollout_id: int) -> dict[str, Any]:
        """Checkpoints of both. The policy's comes last: it is what makes the other count."""
        if self.critic is not None:
            self._offload(self.actor)
            self.session.wait(self.critic.call("save_model", rollout_id))
        return self.session.wait(self.actor.call("save_model", rollout_id))[0]

    def pids(self) -> dict[str, int]:
        return self.actor.pids() | (self.critic.pids() if self.critic is not None else {})

    def _onload(self, group: RayTrainGroup) -> dict[str, Any]:
        return self.session.wait(group.call("onload"))[0] if self.args.offload_train else {}

    def _offload(self, group: RayTrainGroup) -> None:
        if self.args.offload_train:
            self.session.wait(group.call("offload"))


def _of_critic(metrics: dict[str, Any]) -> dict[str, Any]:
    """`train/x` becomes `train/critic-x`; other names stay."""
    return {name.replace("train/", "train/critic-", 1): value for name, value in metrics.items()}
