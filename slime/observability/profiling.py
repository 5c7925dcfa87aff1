"""What a trainer's phases cost: exact times on a GPU, MFU, torch profiles."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from slime.observability.timer import Timer

logger = logging.getLogger(__name__)

TARGETS = {"train": "train_overall", "actor_train": "train_actor", "log_probs": "train_log_probs"}
"""What `--profile-target` calls a phase."""
PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "4090": 165.0,
}
"""Dense bf16 with fp32 accumulation, from the data sheets, by a part of the device's name."""


class PhaseTimer(Timer):
    """Timer of a trainer: a phase ends when the GPU is done with it, and may be profiled.

    Traces of rank 0 go to `profile/` of the run directory, for the rollouts from --profile-step-start up to, not
    including, --profile-step-end.
    """

    def __init__(self, args: Namespace, rank: int) -> None:
        super().__init__()
        self.cuda = args.device == "cuda"
        self.rollout_id = -1
        """Set before the phases of a rollout."""
        self._steps = range(args.profile_step_start, args.profile_step_end)
        self._targets = args.profile_target if args.use_pytorch_profiler and rank == 0 else []
        self._directory = Path(args.run_dir) / "profile"

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        profiled = TARGETS.get(name) in self._targets and self.rollout_id in self._steps
        with self._profile(TARGETS[name]) if profiled else nullcontext(), super().__call__(name):
            try:
                yield
            finally:
                if self.cuda:
                    torch.cuda.synchronize()

    @contextmanager
    def _profile(self, target: str) -> Iterator[None]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            yield
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{target}-rollout-{self.rollout_id}.trace.json.gz"
        profile.export_chrome_trace(str(path))
        logger.info("wrote %s", path)


def peak_tflops(args: Namespace) -> float | None:
    """What this GPU reaches in 16-bit matrix products; None on CPU, in fp32, and for a GPU that is not known."""
    if args.device != "cuda" or args.dtype == "float32":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def utilization(metrics: dict[str, float], peak: float | None) -> dict[str, float]:
    """`perf/{phase}_mfu` for each `perf/{phase}_tflops` (model FLOPs per GPU; what is recomputed does not count)."""
    if peak is None:
        return {}
    return {
        f"{name.removesuffix('_tflops')}_mfu": value / peak
        for name, value in metrics.items()
        if name.endswith("_tflops")
    }
