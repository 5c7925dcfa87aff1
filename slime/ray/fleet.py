"""The engines of one model and the router in front of them: started together, watched, restarted when they fail.

Without `--use-fault-tolerance` the first death ends the run. With it an engine that died or hangs is taken out of the
router and started again. It serves again once the trainers have given it the current weights: until then it is
`UNSYNCED`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from slime.observability.run_dir import RunDir
from slime.ray.engines import create_engine, engine_name
from slime.ray.placement_group import PlacementSlice
from slime.ray.router_process import RouterProcess, router_name
from slime.ray.server_process import ServerError
from slime.utils.served_models import EngineSpec, ServedModel

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_SECS = 15.0
PIDS_TIMEOUT_SECS = 30.0
POLL_SECS = 1.0
KV_CACHE = "kv_cache"
"""The memory that is taken back last."""
MAX_STARTS = 3
"""How often the start of one engine may fail in a row."""


class State(enum.Enum):
    SERVING = "serving"
    UNSYNCED = "waiting for weights"
    LOST = "lost"


class Phase(enum.Enum):
    """What all engines do now."""

    SERVING = "serving"
    UPDATING = "updating weights"
    OFFLOADED = "offloaded"


@dataclass(eq=False)
class Engine:
    """One engine of the fleet. `death` is its actor's `wait_for_death`, `probe` the health check that runs."""

    rank: int
    name: str
    spec: EngineSpec
    actor: Any
    url: str = ""
    state: State = State.SERVING
    death: ray.ObjectRef | None = None
    probe: ray.ObjectRef | None = None
    probed_at: float = 0.0
    started_at: float = 0.0
    released: bool = False
    restarting: bool = False

    def started(self, url: str, state: State) -> None:
        self.url, self.state = url, state
        self.started_at = time.monotonic()
        self.death = self.actor.wait_for_death.remote()
        self.probe, self.released, self.restarting = None, False, False


class EngineFleet:
    """Lives in the rollout manager. Every method may be called from any thread."""

    def __init__(self, args: Namespace, placement: PlacementSlice, model: ServedModel) -> None:
        self.args = args
        self.placement = placement
        self.model = model
        self.gets_weights = model.update_weights and not args.debug_rollout_only
        self.router = RouterProcess(args, RunDir(args.run_dir).log_file(router_name(args, model)), model)
        self.engines: list[Engine] = []
        self.phase = Phase.UPDATING if self.gets_weights else Phase.SERVING
        self.disposed = threading.Event()
        self.fatal: str | None = None
        self.restarts = 0
        self._changed = threading.Condition()
        self._in_update: list[tuple[Engine, str]] = []

    def start(self) -> None:
        """Start engines and router; returns when all are healthy.

        Raises:
            ServerError: one did not start; the message ends with the end of its log.
        """
        args, model = self.args, self.model
        self.engines = [
            Engine(i, engine_name(args, model, i), spec, create_engine(args, self.placement, model, i))
            for i, spec in enumerate(model.engines())
        ]
        starting = [engine.actor.start.remote() for engine in self.engines]
        self.router.start()
        for engine, url in zip(self.engines, ray.get(starting), strict=True):
            engine.started(url, State.SERVING)
            self._route_to(engine)

    def _route_to(self, engine: Engine) -> None:
        port = ray.get(engine.actor.bootstrap_port.remote()) if self.model.is_disaggregated else None
        self.router.add(engine.url, engine.spec.worker_type, port)

    def slots(self, engine: Engine) -> list[int]:
        """The worker slots that the engine stands on; under --colocate these are trainer ranks."""
        return list(engine.spec.slots)

    # -- memory -------------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Engines drop their caches and release weights and KV memory. Until `onload` none is restarted: its memory
        is the trainers'."""
        self._enter(Phase.OFFLOADED)
        self._on_each(lambda engine: engine.actor.flush_cache.remote())
        self._on_each(lambda engine: engine.actor.release_memory_occupation.remote())
        for engine in self.engines:
            engine.released = engine.state is not State.LOST

    def onload(self, tags: list[str] | None = None) -> None:
        """Engines take the memory back; without weights pushed afterwards they must not serve."""
        if self.phase is Phase.OFFLOADED:
            self._enter(Phase.UPDATING)
        self._on_each(
            lambda engine: engine.actor.resume_memory_occupation.remote(tags), lambda engine: engine.released
        )
        if tags is None or KV_CACHE in tags:
            for engine in self.engines:
                engine.released = False

    def _on_each(
        self, call: Callable[[Engine], ray.ObjectRef], choose: Callable[[Engine], bool] = lambda engine: True
    ) -> None:
        calls = [
            (engine, call(engine)) for engine in self.engines if engine.state is not State.LOST and choose(engine)
        ]
        for engine, ref in calls:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                if not self.args.use_fault_tolerance:
                    raise
                self.lose(engine, str(error))

    # -- weights ------------------------------------------------------------------------------------------------------

    def prepare_update(self) -> tuple[list[str], list[list[int]]]:
        """URLs and slots of all engines, once those that failed are there again."""
        self._enter(Phase.UPDATING)
        # One that died a moment ago must not be waited for in a process group.
        self._on_each(lambda engine: engine.actor.health.remote(self.args.rollout_health_check_timeout))
        with self._changed:
            self._changed.wait_for(lambda: self._ended or all(e.state is not State.LOST for e in self.engines))
            self._in_update = [(engine, engine.url) for engine in self.engines]
        return [url for _, url in self._in_update], [self.slots(engine) for engine, _ in self._in_update]

    def finish_update(self) -> None:
        """All engines of `prepare_update` have the new weights."""
        for engine, url in self._in_update:
            if engine.url == url:
                self.admit(engine.rank, url)
        self._enter(Phase.SERVING)

    def wait_for_unsynced(self) -> list[tuple[int, str, list[int]]]:
        """Block until an engine waits for weights while the others serve: rank, URL, slots. Empty at the end."""

        def waiting() -> list[Engine]:
            return [e for e in self.engines if self.phase is Phase.SERVING and e.state is State.UNSYNCED]

        with self._changed:
            self._changed.wait_for(lambda: self._ended or waiting())
            return [] if self._ended else [(e.rank, e.url, self.slots(e)) for e in waiting()]

    def admit(self, rank: int, url: str) -> None:
        """The engine has the current weights: let requests go to it."""
        engine = self.engines[rank]
        if engine.state is State.UNSYNCED and engine.url == url:
            with contextlib.suppress(ServerError):  # a router that is down gets all engines when it is back
                self._route_to(engine)
            engine.state = State.SERVING
            logger.warning("%s serves again at %s", engine.name, url)

    # -- failures -----------------------------------------------------------------------------------------------------

    @property
    def _ended(self) -> bool:
        return self.disposed.is_set() or self.fatal is not None

    def wait_for_death(self) -> str | None:
        """Block until something dies that is not restarted; how it died. None after `dispose`."""
        while not self._ended:
            if self.args.use_fault_tolerance:
                with self._changed:
                    self._changed.wait_for(lambda: self._ended)
                break
            if self.router.is_dead():
                return self.router.process.wait_for_death()
            deaths = {engine.death: engine for engine in self.engines if engine.death is not None}
            if not deaths:
                self.disposed.wait(POLL_SECS)
                continue
            for ref in ray.wait(list(deaths), timeout=POLL_SECS)[0]:
                death = describe_death(deaths[ref])
                deaths[ref].death = None
                if death is not None:
                    return death
        return self.fatal

    def lose(self, engine: Engine, why: str) -> None:
        """Take a failed engine out of the router; the monitor starts it again."""
        with self._changed:
            if engine.state is State.LOST or self._ended:
                return
            engine.state, engine.probe = State.LOST, None
        logger.warning("%s at %s failed: %s", engine.name, engine.url, why)
        with contextlib.suppress(ServerError):
            self.router.remove(engine.url)

    def restart(self, engine: Engine) -> None:
        """End what is left of an engine and start it again; it is `UNSYNCED` then."""
        try:
            ray.get(engine.actor.shutdown.remote(), timeout=SHUTDOWN_TIMEOUT_SECS)
        except ray.exceptions.RayError:
            self._replace_actor(engine)
        failure: Exception | None = None
        for _ in range(MAX_STARTS):
            if self.disposed.is_set():
                return
            try:
                url = ray.get(engine.actor.start.remote())
            except ray.exceptions.RayActorError as error:
                failure = error
                self._replace_actor(engine)
            except ray.exceptions.RayError as error:
                failure = error
            else:
                self._restarted(engine, url)
                return
        with self._changed:
            self.fatal = f"{engine.name} could not be started again: {failure}"
            self._changed.notify_all()

    def _restarted(self, engine: Engine, url: str) -> None:
        with self._changed:
            self.restarts += 1
            engine.started(url, State.UNSYNCED)
            self._changed.notify_all()
        if not self.gets_weights:
            self.admit(engine.rank, url)

    def _replace_actor(self, engine: Engine) -> None:
        ray.kill(engine.actor)
        engine.actor = create_engine(self.args, self.placement, self.model, engine.rank)

    def restart_router(self) -> None:
        """Start the router again on its port and make the engines known to it."""
        logger.warning("the router died: %s", self.router.process.wait_for_death())
        try:
            self.router.start()
            for engine in self.engines:
                if engine.state is State.SERVING:
                    self._route_to(engine)
        except ServerError as error:
            with self._changed:
                self.fatal = f"the router could not be started again: {error}"
                self._changed.notify_all()

    def _enter(self, phase: Phase) -> None:
        with self._changed:
            self.phase = phase
            for engine in self.engines:
                engine.probe = None
            self._changed.notify_all()

    def pids(self) -> dict[str, int]:
        """Processes by name."""
        pids = {} if self.router.process is None else {self.router.name: self.router.process.pid}
        for engine in self.engines:
            with contextlib.suppress(ray.exceptions.RayError):  # it died just now, or is being replaced
                pids |= ray.get(engine.actor.pids.remote(), timeout=PIDS_TIMEOUT_SECS)
        return pids

    def dispose(self) -> None:
        """End all servers."""
        self.disposed.set()
        with self._changed:
            self._changed.notify_all()
        refs = [engine.actor.shutdown.remote() for engine in self.engines]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_TIMEOUT_SECS)
        self.router.close()


def describe_death(engine: Engine) -> str | None:
    """How an engine whose `death` is known died; None when it was shut down."""
    try:
        return ray.get(engine.death)
    except ray.exceptions.RayError as error:
        return f"the actor of {engine.name} died: {error}"
