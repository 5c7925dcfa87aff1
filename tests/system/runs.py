"""Whole runs of `slime train` in processes of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "SLIME_TEST_RUN"


def write_prompts(path: Path, count: int) -> Path:
    rows = [
        {"input": f"what is the sum of {i % 50} and {i % 7} ?", "label": str(i % 50 + i % 7)} for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TrainRun:
    """One run with the tiny model; `flags` come after the defaults and override them.

    It starts a Ray of its own, as a user's run does, unless `ray` is the address of one that runs already.
    """

    def __init__(
        self,
        tmp_path: Path,
        model: str,
        *flags: str,
        run: str = "run",
        prompts: int = 24,
        script: str = "train.py",
        ray: str | None = None,
    ) -> None:
        self.path = tmp_path / run
        self.mark = uuid.uuid4().hex
        data = tmp_path / "prompts.jsonl"
        if not data.exists():
            write_prompts(data, prompts)
        defaults = {
            "--train-backend": "fsdp",
            "--device": "cpu",
            "--hf-checkpoint": model,
            "--prompt-data": data,
            "--label-key": "label",
            "--custom-rm-path": "tests.system.hooks.even_tokens",
            "--rollout-batch-size": 4,
            "--n-samples-per-prompt": 4,
            "--global-batch-size": 8,
            "--rollout-max-response-len": 12,
            "--max-tokens-per-gpu": 128,
            "--actor-num-gpus-per-node": 1,
            "--num-rollout": 2,
            "--lr": 1e-3,
            "--run-dir": self.path,
        }
        argv = [str(word) for item in defaults.items() for word in item]
        joined = {} if ray is None else {"RAY_ADDRESS": ray}
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        self.process = subprocess.Popen(
            [sys.executable, script, *argv, "--use-dynamic-batch-size", "--ci-test", *map(str, flags)],
            cwd=ROOT,
            env={**os.environ, **joined, MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stdout = self.stderr = ""

    def finish(self, timeout: float = 240) -> int:
        """Wait for the end; returns the exit code."""
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            raise
        return self.process.returncode

    def stop(self) -> None:
        """Kill every process of the run."""
        for process in self.processes():
            process.kill()
        self.stdout, self.stderr = self.process.communicate()

    def wait_for(self, condition: Callable[[], bool], timeout: float = 200) -> None:
        """Poll until `condition()`; fails with the run's output when the run ends first."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"ended or took too long\n{self.stdout}\n{self.stderr}")
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """All live processes of this run, found by an environment variable, whoever their parent is."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def metrics(self, axis: str) -> list[dict]:
        return [line for line in read_jsonl(self.path / "metrics.jsonl") if axis in line]

    def trained(self) -> list[dict]:
        path = self.path / "trained.jsonl"
        return read_jsonl(path) if path.exists() else []

    def samples(self, name: str) -> list[dict]:
        return read_jsonl(self.path / "samples" / f"{name}.jsonl")


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
