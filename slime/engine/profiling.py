"""torch profiles of the engine's thread, on request."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from slime.engine.protocol import RequestError


class Profiling:
    """One profile at a time; start and stop run in the engine's thread."""

    def __init__(self):
        self._profile: torch.profiler.profile | None = None
        self._directory = Path()

    def start(self, options: dict[str, Any]) -> None:
        if self._profile is not None:
            raise RequestError("a profile is running already")
        self._directory = Path(str(options.get("output_dir") or tempfile.gettempdir()))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"output_dir cannot be made: {error}") from error
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            record_shapes=bool(options.get("record_shapes", False)),
            with_stack=bool(options.get("with_stack", False)),
        )
        self._profile.start()

    def stop(self) -> str:
        """Write the trace and return its path."""
        if self._profile is None:
            raise RequestError("no profile is running")
        profile, self._profile = self._profile, None
        profile.stop()
        path = self._directory / f"engine-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json.gz"
        profile.export_chrome_trace(str(path))
        return str(path)
