"""The thread behind `--use-fault-tolerance`: it notices engines and routers that died or hang and restarts them.

A death is seen at once. A hang is seen by probes: `/health_generate` while engines serve, `/health` while their
weights are updated (they are paused then). Offloaded engines are left alone.
"""

from __future__ import annotations

import logging
import threading
import time

import ray

from slime.ray.fleet import Engine, EngineFleet, Phase, State, describe_death

logger = logging.getLogger(__name__)

TICK_SECS = 0.5
SLACK_SECS = 2.0
"""A probe that its own timeout does not end is given up after this."""
PATHS = {Phase.SERVING: "/health_generate", Phase.UPDATING: "/health"}


class HealthMonitor:
    """Watches a fleet until that is disposed."""

    def __init__(self, fleet: EngineFleet) -> None:
        self.fleet = fleet
        self._thread = threading.Thread(target=self._run, name="health-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        fleet = self.fleet
        while not fleet.disposed.is_set():
            try:
                self._tick()
            except ray.exceptions.RayError:
                if not fleet.disposed.is_set():
                    logger.exception("the health monitor goes on after an error")
            fleet.disposed.wait(TICK_SECS)

    def _tick(self) -> None:
        fleet = self.fleet
        if fleet.router.is_dead():
            fleet.restart_router()
        for engine in fleet.engines:
            if engine.state is not State.LOST:
                self._check_death(engine)
                self._check_probe(engine)
            if engine.state is State.LOST and not engine.restarting and fleet.phase is not Phase.OFFLOADED:
                engine.restarting = True
                threading.Thread(target=fleet.restart, args=(engine,), daemon=True).start()

    def _check_death(self, engine: Engine) -> None:
        if engine.death is not None and ray.wait([engine.death], timeout=0)[0]:
            death = describe_death(engine)
            engine.death = None
            if death is not None:
                self.fleet.lose(engine, death)

    def _check_probe(self, engine: Engine) -> None:
        args, phase, now = self.fleet.args, self.fleet.phase, time.monotonic()
        probe = engine.probe
        if probe is None:
            grace_is_over = now - engine.started_at >= args.rollout_health_check_first_wait
            due = now - engine.probed_at >= args.rollout_health_check_interval
            if phase in PATHS and not engine.released and grace_is_over and due:
                # One that waits for weights is paused while it gets them.
                path = PATHS[phase if engine.state is State.SERVING else Phase.UPDATING]
                engine.probed_at = now
                engine.probe = engine.actor.health.remote(args.rollout_health_check_timeout, path)
        elif ray.wait([probe], timeout=0)[0]:
            engine.probe = None
            try:
                ray.get(probe)
            except ray.exceptions.RayError as error:
                if self.fleet.phase is phase:
                    self.fleet.lose(engine, f"it failed a health check: {error}")
        elif now - engine.probed_at > args.rollout_health_check_timeout + SLACK_SECS:
            self.fleet.lose(engine, f"no answer to a health check within {args.rollout_health_check_timeout:g} s")
