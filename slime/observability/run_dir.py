"""The run directory: what a person opens to see what a run did.

config.yaml     every argument as run
metrics.jsonl   one object per line: its step axis, the time, the metrics
trained.jsonl   per rollout, the indices of the samples that the trainer took a step on
samples/        a few prompts, responses, rewards and labels of each rollout and evaluation
logs/           one file per process
checkpoints     link to --save
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.utils.types import Sample

SAMPLES_PER_FILE = 8


class RunDir:
    """Paths of one run; every process builds its own from `args.run_dir`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def create(self, args: Namespace) -> RunDir:
        """Make the directory and write the configuration. A resumed run keeps the earlier configurations."""
        from slime.utils.arguments import config_to_yaml

        for name in ("logs", "samples"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        config = self.path / "config.yaml"
        if config.exists():
            config.rename(self.path / f"config.{len(list(self.path.glob('config.*.yaml')))}.yaml")
        config.write_text(config_to_yaml(args))
        if args.save is not None:
            self._link_checkpoints(Path(args.save))
        return self

    def _link_checkpoints(self, target: Path) -> None:
        link = self.path / "checkpoints"
        if target.absolute() == link.absolute():
            return  # they are written here
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(os.path.relpath(target, self.path))

    def log_file(self, process: str) -> Path:
        """Log of one process: `engine-0`, `router`, `train-0`, `rollout-manager`, `driver`."""
        path = self.path / "logs" / f"{process}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def record_trained(self, rollout_id: int, sample_indices: list[int]) -> None:
        """Note which samples a rollout trained on. After a resume the later line of a rollout is the valid one: what
        was trained after the checkpoint was lost with the killed process."""
        with open(self.path / "trained.jsonl", "a") as file:
            file.write(json.dumps({"rollout_id": rollout_id, "sample_indices": sample_indices}) + "\n")

    def write_samples(self, name: str, samples: list[Sample]) -> None:
        """At most `SAMPLES_PER_FILE` samples, spread over the list, to `samples/{name}.jsonl`."""
        path = self.path / "samples" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        stride = max(1, len(samples) // SAMPLES_PER_FILE)
        with open(path, "w") as file:
            for sample in samples[::stride][:SAMPLES_PER_FILE]:
                file.write(json.dumps(sample_record(sample), ensure_ascii=False) + "\n")


def sample_record(sample: Sample) -> dict[str, Any]:
    """What a person wants to read of a sample."""
    return {
        "index": sample.index,
        "group_index": sample.group_index,
        "prompt": to_plain(sample.prompt),
        "response": sample.response,
        "reward": to_plain(sample.reward),
        "label": to_plain(sample.label),
        "status": sample.status.value,
        "response_length": sample.response_length,
        "weight_versions": sorted(set(sample.weight_versions)),
    }


def to_plain(value: Any) -> Any:
    """Only what JSON and YAML know: containers, strings, numbers; anything else becomes its text."""
    if value is None or (isinstance(value, (str, bool, int, float)) and type(value).__module__ == "builtins"):
        return value
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, Iterable) and not hasattr(value, "shape"):
        return [to_plain(v) for v in value]
    return to_plain(value.item()) if hasattr(value, "item") and getattr(value, "size", 1) == 1 else str(value)


def tail(path: str | Path, lines: int = 20, max_bytes: int = 16384) -> str:
    """The last lines of a log, for an error message; says so when there are none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
            text = file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        text = ""
    return "\n".join(text.splitlines()[-lines:]) or "(its log is empty)"


def describe_error(error: BaseException, *directories: str | None) -> str:
    """Type and message; of a full disk also which of the directories that a run writes to has how much space left."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return text
    there = [path for path in directories if path is not None and os.path.isdir(path)]
    free = ", ".join(f"{shutil.disk_usage(path).free / 1e6:,.1f} MB in {path}" for path in there)
    return f"{text}; left: {free}"


def redirect_output(path: str | Path) -> None:
    """Send this process's stdout and stderr, native code and children included, to `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
