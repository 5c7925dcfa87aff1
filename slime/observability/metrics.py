"""Where metrics go: console, `metrics.jsonl`, TensorBoard, wandb. The driver owns the one `MetricsLogger` of a run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from slime.observability.console import ROW, SUPERVISED_ROW, Console
from slime.observability.run_dir import RunDir, to_plain

STEP_AXES = {
    "train/*": "train/step",
    "rollout/*": "rollout/step",
    "multi_turn/*": "rollout/step",
    "passrate/*": "rollout/step",
    "perf/*": "rollout/step",
    "eval/*": "eval/step",
}


class TrackerError(Exception):
    """A tracker cannot be used; the message is for the user."""


class Tracker(Protocol):
    """Takes scalars of one step of one axis (`rollout/step`, `train/step`, `eval/step`)."""

    def log(self, metrics: dict[str, float], step_key: str, step: int) -> None: ...

    def close(self, exit_code: int) -> None: ...


class JsonlTracker:
    """One line per step: `{step_key: step, "time": unix seconds, name: value, ...}`; NaN and infinity as text."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a")  # noqa: SIM115 (closed by close)

    def log(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        values = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        self._file.write(json.dumps({step_key: step, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()

    def close(self, exit_code: int) -> None:
        self._file.close()


class TensorBoardTracker:
    """Event files through tensorboard's own writer, so that the driver need not import torch."""

    def __init__(self, args: Namespace) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        root = args.tb_project_name or os.environ.get("TENSORBOARD_DIR") or str(Path(args.run_dir) / "tensorboard")
        self._writer = EventFileWriter(os.path.join(root, args.tb_experiment_name or ""))

    def log(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases (extra `wandb`)."""

    def __init__(self, args: Namespace) -> None:
        try:
            import wandb
        except ImportError as error:
            raise TrackerError("--use-wandb: wandb is not installed; pip install 'slime[wandb]'") from error
        from slime.utils.arguments import public_config, public_words

        name = args.wandb_group
        if name and args.wandb_random_suffix:
            name = f"{name}_{secrets.token_hex(4)}"
        given = {"api_key": args.wandb_key, "base_url": args.wandb_host}
        argv, sys.argv = sys.argv, public_words(sys.argv, args)  # wandb records and uploads it
        try:
            self._run = wandb.init(
                project=args.wandb_project,
                entity=args.wandb_team,
                group=args.wandb_group,
                name=name,
                id=args.wandb_run_id,
                resume="allow" if args.wandb_run_id else None,
                mode=args.wandb_mode,
                dir=args.wandb_dir or args.run_dir,
                config=to_plain(public_config(args)),
                settings=wandb.Settings(**{key: value for key, value in given.items() if value is not None}),
            )
        except (wandb.Error, ValueError) as error:
            fix = "set WANDB_API_KEY, or --wandb-mode offline and `wandb sync` later"
            raise TrackerError(f"--use-wandb: {' '.join(str(error).split())}\n    fix: {fix}") from error
        finally:
            sys.argv = argv
        for axis in sorted(set(STEP_AXES.values())):
            self._run.define_metric(axis)
        for pattern, axis in STEP_AXES.items():
            self._run.define_metric(pattern, step_metric="train/step" if args.wandb_always_use_train_step else axis)

    def log(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        self._run.log({step_key: step, **metrics})

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class MetricsLogger:
    """Sends each step's metrics to every tracker that the arguments ask for, and shows the run on the console."""

    def __init__(self, args: Namespace) -> None:
        run_dir = RunDir(args.run_dir)
        self._args = args
        columns = SUPERVISED_ROW if args.loss_type == "sft_loss" else ROW
        self.console = Console(run_dir.log_file("driver"), columns)
        self._trackers: list[Tracker] = [JsonlTracker(run_dir.path / "metrics.jsonl")]
        if args.use_tensorboard:
            self._trackers.append(TensorBoardTracker(args))
        if args.use_wandb:
            self._trackers.append(WandbTracker(args))

    def log(self, metrics: dict[str, Any], step_key: str = "rollout/step", step: int = 0) -> None:
        """Log the scalars of `metrics`; anything that is no number is left out."""
        scalars = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        for tracker in self._trackers:
            tracker.log(scalars, step_key, step)

    def log_rollout(self, rollout_id: int, num_rollout: int, metrics: dict[str, Any]) -> None:
        """A rollout's metrics, each on its axis (`train/step` counts optimizer steps), and the console's row."""
        step = int(metrics.get("train/step", rollout_id))
        train = {name: value for name, value in metrics.items() if name.startswith("train/") and name != "train/step"}
        rest = {name: value for name, value in metrics.items() if not name.startswith("train/")}
        if train:
            self.log(train, "train/step", step)
        self.log(rest, *self._axis("rollout/step", rollout_id, rollout_id))
        self.console.row(rollout_id, num_rollout, metrics)

    def log_eval(self, rollouts_done: int, metrics: dict[str, Any]) -> None:
        """An evaluation after `rollouts_done` rollouts."""
        self.log(metrics, *self._axis("eval/step", rollouts_done, rollouts_done))
        self.console.evaluation(rollouts_done, metrics)

    def _axis(self, step_key: str, step: int, rollout_id: int) -> tuple[str, int]:
        """With `--wandb-always-use-train-step` everything stands on `train/step`."""
        args = self._args
        if not args.wandb_always_use_train_step:
            return step_key, step
        return "train/step", rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Live progress of one phase of the loop on the console."""
        with self.console.phase(name):
            yield

    def close(self, exit_code: int = 0) -> None:
        """End all trackers; with an exit code other than 0 they show the run as failed."""
        for tracker in self._trackers:
            with contextlib.suppress(OSError):  # of a full disk, which `log` has reported
                tracker.close(exit_code)
        self.console.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (hasattr(value, "item") and getattr(value, "size", 1) == 1)
