"""The driver's side of fault tolerance: weights for engines that were restarted, and updates that an engine's death
interrupted."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import ray

from slime.ray.actor_group import RayTrainGroup
from slime.ray.session import RunError, Session, root_cause
from slime.weight_sync.engines import WeightSyncError

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
"""How often one update is begun before the run ends."""


class EngineRecovery:
    """Sends weights; with `--use-fault-tolerance` also to engines that come back, whatever the driver waits for."""

    def __init__(self, args: Namespace, session: Session, manager: Any, actor: RayTrainGroup) -> None:
        self.args = args
        self.session = session
        self.manager = manager
        self.actor = actor
        self._connected_to: list[str] | None = None
        self._failures = 0
        if args.use_fault_tolerance and not args.debug_train_only:
            session.on_event(manager.wait_for_unsynced_engines.remote, self._sync_restarted)

    def update_weights(self) -> dict[str, float]:
        """The trainers' weights to all engines.

        Raises:
            RunError: it failed for another reason than an engine's death, or again and again.
        """
        wait = self.session.wait
        if not self.args.use_fault_tolerance:
            return wait(self.actor.call("update_weights"))[0]
        attempt = 0
        while True:
            attempt += 1
            urls, slots = wait(self.manager.prepare_weight_update.remote())
            try:
                if urls != self._connected_to:
                    wait(self.actor.call("set_rollout_engines", urls, slots))
                    self._connected_to = urls
                metrics = wait(self.actor.call("update_weights"))[0]
            except RunError as error:
                if attempt == MAX_ATTEMPTS or not _is_sync_error(error):
                    raise
                self.session.console.line(f"weight update {attempt} failed, trying again: {first_line(error)}")
                self._connected_to = None
            else:
                wait(self.manager.finish_weight_update.remote())
                return metrics

    def _sync_restarted(self, engines: list[tuple[int, str, list[int]]]) -> None:
        """Give restarted engines the weights that the others have, then let them serve."""
        if not engines:
            return
        wait = self.session.wait
        urls, slots = [url for _, url, _ in engines], [ranks for _, _, ranks in engines]
        try:
            wait(self.actor.call("sync_new_engines", urls, slots))
        except RunError as error:
            self._failures += 1
            if self._failures == MAX_ATTEMPTS or not _is_sync_error(error):
                raise
            return  # it died again: the monitor sees that
        self._failures = 0
        self._connected_to = None
        for rank, url, _ in engines:
            wait(self.manager.admit_engine.remote(rank, url))
        self.session.track_memory(wait(self.manager.pids.remote()))
        names = ", ".join(f"engine-{rank}" for rank, _, _ in engines)
        self.session.console.line(f"{names} restarted; serves again with the current weights")


def _is_sync_error(error: RunError) -> bool:
    cause = error.__cause__
    return isinstance(cause, ray.exceptions.RayTaskError) and isinstance(root_cause(cause), WeightSyncError)


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300]
