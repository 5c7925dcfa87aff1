"""The life of a run: Ray started, signals caught, deaths of servers noticed, everything ended at the end.

    with Session(args) as session:
        ...
    return session.exit_code

Whatever happens inside - an error, Ctrl-C, SIGTERM, an engine that dies - leaves no process behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from slime.observability import stacks
from slime.observability.metrics import MetricsLogger, TrackerError
from slime.observability.run_dir import RunDir, describe_error, tail
from slime.ray.placement_group import total_slots
from slime.ray.temp_dir import RayTempDir

OBJECT_STORE_BYTES_CPU = 256 * 1024**2
DISPOSE_TIMEOUT_SECS = 20.0
FAILED_DISPOSE_TIMEOUT_SECS = 5.0
SIGNALLED_DISPOSE_TIMEOUT_SECS = 3.0
EXIT_TIMEOUT_SECS = 5.0
PR_SET_CHILD_SUBREAPER = 36
GUARD_PATIENCE_SECS = 2.0
STUCK_REPORT_SECS = 1800.0
"""A wait that takes longer is reported, and again after each further such time; `--phase-timeout-secs` ends it."""
PROGRESS_INTERVAL_SECS = 0.5
TRACKER = "latest_checkpointed_iteration.txt"


class RunError(RuntimeError):
    """The run cannot go on; the message is for the user."""


@dataclass(eq=False)
class _Event:
    """See `Session.on_event`; `ref` is what is waited for now."""

    make_ref: Callable[[], ray.ObjectRef]
    handle: Callable[[Any], None]
    ref: ray.ObjectRef | None = None

    def arm(self) -> ray.ObjectRef:
        if self.ref is None:
            self.ref = self.make_ref()
        return self.ref


class Session:
    """Context manager of a run. `wait` is how the driver waits for anything remote."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.exit_code = 0
        self._begin = time.monotonic()
        try:
            self.run_dir = RunDir(args.run_dir).create(args)
            self.metrics = MetricsLogger(args)
        except OSError as error:
            sys.exit(f"error: --run-dir {args.run_dir}: {error}\n    fix: give a directory that can be written to")
        except TrackerError as error:
            sys.exit(f"error: {error}")
        self.console = self.metrics.console
        self._guards: list[ray.ObjectRef] = []
        self._events: list[_Event] = []
        self._in_event = False
        self._cleanups: list[Callable[[], Any]] = []
        self._explanations: dict[str, Callable[[], ray.ObjectRef]] = {}
        self._names: dict[str, str] = {}
        self._tracked = {"driver": psutil.Process()}
        self._temp_dir: RayTempDir | None = None
        self._owns_ray = False
        self._terminated = False
        self._handlers: dict[int, Any] = {}
        self._before: set[psutil.Process] = set()

    # -- start and end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        self._before = set(_descendants())
        _adopt_orphans(True)
        main_thread = threading.current_thread() is threading.main_thread()
        if main_thread:
            self._handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, self._on_terminate)
        try:
            self._start_ray()
            if main_thread:
                signal.signal(signal.SIGTERM, self._on_terminate)  # ray.init has put its own in place
        except BaseException as error:
            # Ray's own handler ends a process by `sys.exit(signal number)`.
            self._terminated |= isinstance(error, SystemExit) and error.code == signal.SIGTERM
            self.exit_code = self._report(KeyboardInterrupt() if self._terminated else error)
            self._close(signalled=True)
            raise SystemExit(self.exit_code) from error
        return self

    def _on_terminate(self, number: int, frame: Any) -> None:
        # Ray's blocking calls let a KeyboardInterrupt through, and nothing else.
        self._terminated = True
        raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            self.console.line(f"done in {_minutes(time.monotonic() - self._begin)}; run directory {self.run_dir.path}")
        else:
            self.exit_code = self._report(error)
        try:
            self._close(signalled=isinstance(error, KeyboardInterrupt), failed=error is not None)
        except KeyboardInterrupt:
            _end_processes(self._started(), patience=0)
        return isinstance(error, (Exception, KeyboardInterrupt))

    def _start_ray(self) -> None:
        """Join the cluster that RAY_ADDRESS names, or start a private one on this machine's loopback."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        env = worker_env(self.args)
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "namespace": None}
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**common, runtime_env={"env_vars": env})
            return
        os.environ.update(env)
        self._owns_ray = True
        self._temp_dir = RayTempDir()
        options: dict[str, Any] = {}
        if self.args.device == "cpu":
            options = {
                "num_gpus": 0,
                "num_cpus": total_slots(self.args),
                "object_store_memory": OBJECT_STORE_BYTES_CPU,
            }
        ray.init(
            address="local",
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self._temp_dir.path),
            **common,
            **options,
        )

    def on_close(self, cleanup: Callable[[], Any]) -> None:
        """Call `cleanup` when the run ends, last registered first. It may return a ref to wait for."""
        self._cleanups.append(cleanup)

    def _close(self, signalled: bool, failed: bool = False) -> None:
        """End actors and servers in order, then Ray, then whatever is left of what this process started."""
        timeout = FAILED_DISPOSE_TIMEOUT_SECS if failed else DISPOSE_TIMEOUT_SECS
        if signalled:
            timeout = SIGNALLED_DISPOSE_TIMEOUT_SECS
        try:
            for cleanup in reversed(self._cleanups if ray.is_initialized() else []):
                # An actor that is gone already, or hangs, must not keep the others alive.
                with contextlib.suppress(ray.exceptions.RayError):
                    ref = cleanup()
                    if ref is not None:
                        ray.get(ref, timeout=timeout)
        finally:
            if signalled and self._owns_ray:
                # The signal may have reached Ray's processes too, and ray.shutdown waits for them without limit.
                _end_processes(self._started(), patience=0)
            ray.shutdown()
            if self._owns_ray:
                _end_processes(self._started(), patience=EXIT_TIMEOUT_SECS)
            if self._temp_dir is not None:
                self._temp_dir.remove()
            _adopt_orphans(False)
            self.metrics.close(self.exit_code)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _started(self) -> list[psutil.Process]:
        """Every process below this one that the run has started, however deep."""
        return [process for process in _descendants() if process not in self._before]

    # -- waiting ------------------------------------------------------------------------------------------------------

    def name_actor(self, actor: Any, name: str) -> Any:
        """`name` is what messages call the actor; `logs/{name}.log` is its log."""
        self._names[actor._actor_id.hex()] = name
        return actor

    def track_memory(self, pids: dict[str, int]) -> None:
        """Processes (on this node) that `memory_metrics` reports beside the driver."""
        self._tracked |= {name: psutil.Process(pid) for name, pid in pids.items() if psutil.pid_exists(pid)}

    def explain_with(self, name: str, ask: Callable[[], ray.ObjectRef]) -> None:
        """A report of a stuck phase adds what `ask()` yields to the stacks of the process `name`."""
        self._explanations[name] = ask

    def memory_metrics(self) -> dict[str, float]:
        """Resident memory of each tracked process in GB, pages that processes share counted for each of them."""
        metrics = {}
        for name, process in self._tracked.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                metrics[f"perf/memory_gb/{name}"] = process.memory_info().rss / 1e9
        return metrics

    def guard(self, ref: ray.ObjectRef) -> None:
        """From now on `wait` fails as soon as `ref` yields a text (how a server died)."""
        self._guards.append(ref)

    def on_event(self, make_ref: Callable[[], ray.ObjectRef], handle: Callable[[Any], None]) -> None:
        """While the driver waits for anything, call `handle` with what `make_ref()` yields, again and again."""
        self._events.append(_Event(make_ref, handle))

    def wait(self, refs: Any, progress: Callable[[], ray.ObjectRef] | None = None) -> Any:
        """`ray.get` that also ends when a guarded process dies, and at the first failure among several refs.

        Args:
            progress: asked now and then for a text that the console shows beside the phase (terminals only).

        Raises:
            RunError: an actor failed or a guarded process died; the message has its name, and the end of its log when
                it is dead. Or the wait took longer than `--phase-timeout-secs`; the message says what each process
                is doing. (Without that flag it is only reported, every `STUCK_REPORT_SECS`.)
        """
        pending = list(refs) if isinstance(refs, list) else [refs]
        show = progress if self.console.is_live else None
        limit = self.args.phase_timeout_secs
        begin = time.monotonic()
        deadline = begin + (STUCK_REPORT_SECS if limit is None else limit)
        while pending:
            left = max(0.0, deadline - time.monotonic())
            patience = min(PROGRESS_INTERVAL_SECS, left) if show else left
            events = [] if self._in_event else [event.arm() for event in self._events]
            ready, _ = ray.wait([*pending, *self._guards, *events], timeout=patience)
            self._check_guards(timeout=0)
            if time.monotonic() >= deadline and not ready:
                if limit is not None:
                    raise RunError(self._describe_stuck(f"more than --phase-timeout-secs {limit:g}"))
                took = _minutes(time.monotonic() - begin)
                self.console.line(self._describe_stuck(f"{took} so far; --phase-timeout-secs would end it"))
                deadline = time.monotonic() + STUCK_REPORT_SECS
            if show and not ready:
                self.console.progress(ray.get(show()))
            for ref in ready:
                if ref in pending:
                    pending.remove(ref)
                    self._get(ref)
            for event in self._events:
                if event.ref in ready:
                    self._handle(event)
        return ray.get(refs)

    def _handle(self, event: _Event) -> None:
        ref, event.ref = event.ref, None
        self._in_event = True
        try:
            event.handle(self._get(ref))
        finally:
            self._in_event = False

    def _describe_stuck(self, how_long: str) -> str:
        """The phase that takes so long, and what each process of this machine is doing."""
        logs = {name: (process.pid, self.run_dir.log_file(name)) for name, process in self._tracked.items()}
        del logs["driver"]
        words = stacks.collect(logs)
        for name, ask in self._explanations.items():
            with contextlib.suppress(ray.exceptions.RayError):
                if name in words and (text := ray.get(ask(), timeout=stacks.ANSWER_SECS)):
                    words[name] += f"; coroutines: {text}"
        lines = "".join(f"\n  {name}: {text}" for name, text in sorted(words.items()))
        phase = self.console.current_phase or "a phase"
        return f"{phase} has taken {how_long}. What each process is doing:{lines}"

    def _get(self, ref: ray.ObjectRef) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            # Often only the consequence of a server's death, which is noticed a moment later.
            self._check_guards(timeout=GUARD_PATIENCE_SECS)
            name = self._names.get(ref.task_id().actor_id().hex(), "an actor")
            raise RunError(self._describe(name, error)) from error

    def _describe(self, name: str, error: ray.exceptions.RayError) -> str:
        if isinstance(error, ray.exceptions.RayTaskError):
            return f"{name}: {self._words(root_cause(error))}"
        log = self.run_dir.log_file(name)
        words = tail(log) if log.exists() and log.stat().st_size else f"(it is empty)\n{_last_line(error)}"
        return f"{name} died. The end of its log {log}:\n{words}{self._how_to_resume()}"

    def _words(self, error: BaseException) -> str:
        return describe_error(error, self.args.run_dir, self.args.save)

    def _how_to_resume(self) -> str:
        save = self.args.save
        if save is None or not os.path.exists(os.path.join(save, TRACKER)):
            return ""
        return f"\nthe same command with --load {save} continues from the last checkpoint"

    def _check_guards(self, timeout: float) -> None:
        if not self._guards:
            return
        ready, self._guards = ray.wait(self._guards, timeout=timeout)
        for ref in ready:
            death = ray.get(ref)
            if death is not None:
                raise RunError(death)

    # -- errors -------------------------------------------------------------------------------------------------------

    def _report(self, error: BaseException) -> int:
        """Tell the user what ended the run; returns the exit code."""
        if isinstance(error, KeyboardInterrupt):
            self.console.error(f"{'terminated' if self._terminated else 'interrupted'}: ending all processes")
            return 143 if self._terminated else 130
        if not isinstance(error, Exception):
            return 1
        self.console.record("".join(traceback.format_exception(error)))
        what = str(error) if isinstance(error, RunError) else self._words(error)
        self.console.error(f"error: {what}\n(logs: {self.run_dir.path / 'logs'})")
        return 1


def _last_line(error: BaseException) -> str:
    """Ray's texts hold the traceback of another process; what was raised there stands last."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def root_cause(error: ray.exceptions.RayTaskError) -> BaseException:
    """The exception that was raised in the actor (actors may call actors)."""
    cause: BaseException = error
    while isinstance(cause, ray.exceptions.RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    return cause


def worker_env(args: Namespace) -> dict[str, str]:
    """Environment of all processes of the run.

    They find the user's modules where this process does. On CPU they have one compute thread each, unless the user's
    environment says more: several processes that take all cores each are slower.
    """
    names = ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE")
    env = {name: os.environ[name] for name in names if name in os.environ}
    paths = [os.path.abspath(sys.path[0]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    if args.device == "cpu":
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    return env


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _end_processes(processes: list[psutil.Process], patience: float) -> None:
    """Wait `patience` seconds for them to end by themselves, then kill."""
    _, alive = psutil.wait_procs(processes, timeout=patience)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=EXIT_TIMEOUT_SECS)


def _adopt_orphans(on: bool) -> None:
    """Let this process inherit descendants whose parents die (Linux), so that none can escape `_descendants`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
