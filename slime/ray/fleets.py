"""The fleets of all models that a run serves: the policy's, and those of frozen models beside it."""

from __future__ import annotations

import queue
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

from slime.ray.fleet import EngineFleet
from slime.ray.health_monitor import HealthMonitor
from slime.ray.placement_group import PlacementSlice
from slime.utils.served_models import policy_model


class Fleets:
    """Lives in the rollout manager.

    Attributes: `policy` (the fleet that rollouts are generated with and that gets the weights), `all`.
    """

    def __init__(self, args: Namespace, placement: PlacementSlice) -> None:
        self.all = [EngineFleet(args, placement, model) for model in args.served_models]
        self.policy = next(fleet for fleet in self.all if fleet.model == policy_model(args))
        self._monitors = [HealthMonitor(fleet) for fleet in self.all] if args.use_fault_tolerance else []

    def start(self) -> None:
        """Start all engines and routers at once; returns when all are healthy.

        Raises:
            ServerError: one did not start; the message ends with the end of its log.
        """
        with ThreadPoolExecutor(len(self.all), thread_name_prefix="start-fleet") as pool:
            for started in [pool.submit(fleet.start) for fleet in self.all]:
                started.result()
        for monitor in self._monitors:
            monitor.start()

    @property
    def restarts(self) -> int:
        """Engines that were started again, so far."""
        return sum(fleet.restarts for fleet in self.all)

    def wait_for_death(self) -> str | None:
        """Block until something dies that is not restarted; how it died. None after `dispose`."""
        deaths: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for fleet in self.all:
            threading.Thread(target=lambda f=fleet: deaths.put(f.wait_for_death()), daemon=True).start()
        return next((death for death in (deaths.get() for _ in self.all) if death is not None), None)

    def pids(self) -> dict[str, int]:
        """Processes by name."""
        return {name: pid for fleet in self.all for name, pid in fleet.pids().items()}

    def dispose(self) -> None:
        """End all servers."""
        for fleet in self.all:
            fleet.dispose()
