"""A long run of the tiny model in which things go wrong all the time, and what is left of it.

    python -m benchmarks.soak                                  # 200 rollouts, 20 kills, 3 hanging rewards
    python -m benchmarks.soak --rollouts 30 --kills 5 --hangs 1
    python -m benchmarks.soak --fully-async --name soak-fully-async    # generation never stops, age is bounded

The asynchronous loop with partial rollouts (or with generation that never stops) and two engines. Engine servers are
killed (or stopped) at random. A reward call that hangs ends the run after `--rm-timeout-secs`; it is resumed from its
last checkpoint. At the end: every sample was trained on exactly once or waits in the buffer, the memory of each
process was flat, no process and no port is left.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.environment import describe, write_result
from slime.utils import state_file
from tests.system.runs import TrainRun, read_jsonl
from tests.tiny_model import save_tiny_model

GROUPS, SAMPLES, OVER_SAMPLING = 4, 4, 6
FULLY_ASYNC = ["--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout"]
FULLY_ASYNC += ["--max-weight-staleness", "2"]
KINDS = {
    "driver": "train_async.py",
    "rollout-manager": "ray::RolloutManager",
    "trainer": "ray::TrainWorker",
    "engine-actor": "ray::EmbeddedEngineActor",
    "engine": "slime.engine.server",
    "router": "slime.router.server",
    "raylet": "/raylet/raylet",
    "gcs": "/gcs/gcs_server",
}
MEMORY_INTERVAL_SECS = 1.0
WARM_UP_SECS = 90.0
"""What a process loads while it starts is no growth."""
MAX_GROWTH = 0.10


class Watcher(threading.Thread):
    """Samples the memory of the run's processes and kills engines when it is time."""

    def __init__(self, rng: random.Random, kills: list[int]) -> None:
        super().__init__(daemon=True)
        self.rng = rng
        self.kills = kills
        """Rollouts after which an engine dies, in order."""
        self.done: Counter[str] = Counter()
        self.memory: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.ports: set[int] = set()
        self.run_now: TrainRun | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(MEMORY_INTERVAL_SECS):
            if self.run_now is not None:
                self._look(self.run_now)

    def _look(self, run: TrainRun) -> None:
        engines = []
        for process in run.processes():
            try:
                words = process.cmdline()
                kind = next((k for k, word in KINDS.items() if any(word in w for w in words)), None)
                if kind is None:
                    continue
                if time.time() - process.create_time() > WARM_UP_SECS:
                    self.memory[kind, process.pid].append(process.memory_info().rss / 1e6)
                if kind in ("engine", "router"):
                    listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                    self.ports |= {connection.laddr.port for connection in listening}
                    engines += [process] if kind == "engine" and listening else []
            except psutil.Error:
                continue
        if self.kills and engines and len(last_lines(run)) > self.kills[0]:
            victim = self.rng.choice(engines)
            how = signal.SIGSTOP if self.rng.random() < 0.25 else signal.SIGKILL
            try:
                victim.send_signal(how)
            except psutil.NoSuchProcess:
                return
            self.kills.pop(0)
            self.done[how.name] += 1
            print(f"{how.name} to engine {victim.pid} after rollout {len(last_lines(run))}", flush=True)


def last_lines(run: TrainRun) -> dict[int, list[int]]:
    """rollout id -> indices that were trained on; after a resume the later line counts."""
    return {line["rollout_id"]: line["sample_indices"] for line in run.trained()}


def flags(args: argparse.Namespace, save: Path) -> list[Any]:
    return [
        "--rollout-num-gpus", 2, "--num-rollout", args.rollouts, "--save", save, "--save-interval", 5,
        "--over-sampling-batch-size", OVER_SAMPLING, "--rollout-shuffle",
        "--use-fault-tolerance", "--rollout-health-check-interval", 2, "--rollout-health-check-timeout", 10,
        "--rollout-health-check-first-wait", 0, "--rm-timeout-secs", 10,
        "--custom-rm-path", "benchmarks.soak_rewards.sometimes_hangs",
        *(FULLY_ASYNC if args.fully_async else ["--partial-rollout"]),
    ]  # fmt: skip


def run_all(args: argparse.Namespace, root: Path) -> tuple[list[TrainRun], Watcher, float]:
    """The run, and its continuations after hanging rewards."""
    rng = random.Random(args.seed)
    model, save = root / "model", root / "checkpoints"
    save_tiny_model(str(model))
    per_rollout = GROUPS * SAMPLES
    # In the first quarter, so that the processes of the last part live long enough to show a leak.
    hangs = rng.sample(range(2 * per_rollout, args.rollouts // 4 * per_rollout), args.hangs)
    for index in hangs:
        (root / f"hang-{index}").touch()
    kills = sorted(rng.sample(range(1, max(2, args.rollouts - 2)), args.kills))
    watcher = Watcher(rng, kills)
    watcher.start()
    runs: list[TrainRun] = []
    start = time.monotonic()
    while True:
        more = ["--load", save] if (save / "latest_checkpointed_iteration.txt").exists() else []
        run = TrainRun(root, str(model), *flags(args, save), *more, script="train_async.py", prompts=40)
        watcher.run_now = run
        runs.append(run)
        code = run.finish(timeout=args.timeout)
        watcher.run_now = None
        if code == 0:
            break
        if "RewardError" not in run.stderr or len(runs) > args.hangs + 1:
            raise SystemExit(f"the run ended with code {code}:\n{run.stdout[-3000:]}\n{run.stderr[-5000:]}")
        print(f"a reward hung: resumed after {len(last_lines(run))} rollouts", flush=True)
    watcher.stop.set()
    watcher.join()
    return runs, watcher, time.monotonic() - start


def check_samples(run: TrainRun, save: Path, rollouts: int) -> dict[str, int]:
    lines = last_lines(run)
    trained = Counter(index for indices in lines.values() for index in indices)
    state = state_file.load(str(save / "rollout" / f"global_dataset_state_dict_{rollouts - 1}.pt"))
    waiting = {sample["index"] for group in state["buffer"] for sample in group}
    return {
        "rollouts": len(lines),
        "trained": len(trained),
        "trained_twice": sum(count > 1 for count in trained.values()),
        "waiting_in_the_buffer": len(waiting),
        "lost": len(set(range(state["sample_index"])) - set(trained) - waiting),
        "both": len(waiting & set(trained)),
    }


def check_memory(watcher: Watcher) -> dict[str, dict[str, float]]:
    """MB in the first and last tenth of the longest-lived process of each kind."""
    out = {}
    for kind in KINDS:
        series = max((values for (k, _), values in watcher.memory.items() if k == kind), key=len, default=[])
        if len(series) < 20:
            continue
        tenth = max(1, len(series) // 10)
        first, last = statistics.mean(series[:tenth]), statistics.mean(series[-tenth:])
        out[kind] = {"first": round(first, 1), "last": round(last, 1), "growth": round(last / first - 1, 3)}
    return out


def open_ports(ports: set[int]) -> list[int]:
    found = []
    for port in sorted(ports):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                found.append(port)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--hangs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fully-async", action="store_true")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for one part of the run")
    parser.add_argument("--name", default="soak", help="of the result file")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="slime-soak-"))
    runs, watcher, seconds = run_all(args, root)
    left = [process.cmdline() for run in runs for process in run.processes()]
    samples = check_samples(runs[-1], root / "checkpoints", args.rollouts)
    memory = check_memory(watcher)
    restarts = (runs[-1].path / "logs" / "rollout-manager.log").read_text().count("serves again at")
    metrics = [m for m in read_jsonl(runs[-1].path / "metrics.jsonl") if "rollout/staleness/mean" in m]
    results = {
        "seconds": round(seconds, 1),
        "parts": len(runs),
        "kills": dict(watcher.done),
        "engine_restarts": restarts,
        "samples": samples,
        "memory_mb": memory,
        "processes_left": left,
        "ports_left": open_ports(watcher.ports),
        "staleness_mean": statistics.mean(m["rollout/staleness/mean"] for m in metrics),
        "staleness_max": max(m["rollout/staleness/max"] for m in metrics),
    }
    problems = [key for key in ("trained_twice", "lost", "both") if samples[key]]
    problems += [f"{kind} grew" for kind, row in memory.items() if row["growth"] > MAX_GROWTH]
    problems += [key for key in ("processes_left", "ports_left") if results[key]]
    problems += ["rollouts missing"] if samples["rollouts"] != args.rollouts else []
    results["problems"] = problems
    print(json.dumps(results, indent=2))
    settings = {key: getattr(args, key) for key in ("rollouts", "kills", "hangs", "seed", "fully_async")}
    write_result(args.name, {"settings": settings, "results": results, "environment": describe("torch", "ray")})
    if problems:
        print(f"FAILED: {problems}; the run is in {root}", file=sys.stderr)
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
