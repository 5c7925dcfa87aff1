"""The console of a run: a live line for the phase that runs now, then one row per rollout.

On a terminal it is drawn by rich; otherwise each row is one plain line. `logs/driver.log` gets the plain lines too.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROW = (
    ("reward", "rollout/raw_reward", ".3f"),
    ("len", "rollout/response_len/mean", ".1f"),
    ("trunc", "rollout/truncated_ratio", ".0%"),
    ("loss", "train/loss", ".4g"),
    ("kl", "train/kl_loss", ".3g"),
    ("clip", "train/pg_clipfrac", ".3g"),
    ("gnorm", "train/grad_norm", ".3g"),
    ("generate", "perf/rollout_time", ".1fs"),
    ("train", "perf/train_time", ".1fs"),
    ("sync", "perf/update_weights_time", ".2fs"),
)
SUPERVISED_ROW = tuple(cell for cell in ROW if cell[0] not in ("reward", "trunc", "kl", "clip"))
"""Supervised samples have no reward."""
NOT_SHOWN = ("/", "-truncated", "-pass@")
"""Parts of metric names that say more about a data set than its one line has room for."""


class Console:
    """Prints to stdout and appends every line to the driver's log."""

    def __init__(self, log_file: Path, columns: tuple[tuple[str, str, str], ...] = ROW) -> None:
        self._columns = columns
        self._log = open(log_file, "a")  # noqa: SIM115 (closed by close)
        self._rich = None
        self.current_phase: str | None = None
        self._spinner_text: Callable[[str], None] = _ignore
        if sys.stdout.isatty():
            from rich.console import Console as RichConsole

            self._rich = RichConsole()

    @property
    def is_live(self) -> bool:
        """Whether there is a terminal that shows progress."""
        return self._rich is not None

    def progress(self, text: str) -> None:
        """Show `text` beside the phase that runs."""
        self._spinner_text(text)

    def line(self, text: str) -> None:
        self.record(text)
        if self._rich is not None:
            self._rich.print(text, highlight=True, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def error(self, text: str) -> None:
        """To stderr and the log."""
        self.record(text)
        print(text, file=sys.stderr, flush=True)

    def row(self, rollout_id: int, num_rollout: int, metrics: dict[str, Any]) -> None:
        """One line that sums a rollout up, e.g. `rollout 3/100  reward 0.412  len 23.1  ...`."""
        cells = [f"{label} {_format(metrics[key], spec)}" for label, key, spec in self._columns if key in metrics]
        self.line("  ".join([f"rollout {rollout_id + 1}/{num_rollout}", *cells]))

    def evaluation(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        """One line with the mean reward per dataset (keys `eval/{name}` without further parts)."""
        scores = [(key.split("/", 1)[1], value) for key, value in metrics.items() if key.startswith("eval/")]
        shown = [(name, value) for name, value in scores if not any(part in name for part in NOT_SHOWN)]
        cells = [f"{name} {value:.3f}" for name, value in shown]
        self.line("  ".join([f"eval after {rollout_id} rollouts", *cells]))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A spinner with the elapsed time while the phase runs (terminals only); the log notes start and end."""
        start = time.monotonic()
        self.current_phase = name
        self.record(f"{name} ...")
        with self._spinner(name):
            yield
        self.current_phase = None
        self.record(f"{name}: {time.monotonic() - start:.2f}s")

    @contextlib.contextmanager
    def _spinner(self, name: str) -> Iterator[None]:
        if self._rich is None:
            yield
            return
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._rich, transient=True, refresh_per_second=4) as progress:
            task = progress.add_task(name, total=None)
            self._spinner_text = lambda text: progress.update(task, description=f"{name} {text}")
            yield
            self._spinner_text = _ignore

    def record(self, text: str) -> None:
        """Only to the driver's log."""
        stamp = time.strftime("%H:%M:%S")
        with contextlib.suppress(OSError):  # a full disk must not keep a run from saying so
            self._log.write("".join(f"{stamp} {line}\n" for line in text.splitlines()))
            self._log.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._log.close()


def _ignore(text: str) -> None:
    """Nothing shows progress now."""


def _format(value: float, spec: str) -> str:
    return f"{value:{spec[:-1]}}s" if spec.endswith("s") else f"{value:{spec}}"
