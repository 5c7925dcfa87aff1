"""Learning rate by optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate by number of optimizer steps done, as Megatron's OptimizerParamScheduler defines it.

    `init -> max` linearly over `warmup_iters`, then by `style` to `min_lr` at `decay_iters` (which counts the warmup),
    and `min_lr` from there on. The first optimizer step uses `lr(0)`.
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup_iters: int = 0
    decay_iters: int = 1
    style: str = "constant"
    """constant, linear, cosine or WSD (constant, then a final decay over `wsd_decay_iters`)."""
    wsd_decay_iters: int = 0
    wsd_decay_style: str = "exponential"

    def __post_init__(self):
        if self.style == "constant":
            return
        if self.warmup_iters >= self.decay_iters:
            raise ValueError(
                f"--lr-warmup-iters gives {self.warmup_iters} steps of warmup, but --lr-decay-iters is "
                f"{self.decay_iters} (default: all steps of the run): warmup must be shorter"
            )
        if self.style == "WSD" and not 0 < self.wsd_decay_iters <= self.decay_iters:
            raise ValueError(
                f"--lr-decay-style WSD needs --lr-wsd-decay-iters between 1 and {self.decay_iters} "
                f"(--lr-decay-iters), got {self.wsd_decay_iters}"
            )

    def lr(self, step: int) -> float:
        if self.warmup_iters > 0 and step <= self.warmup_iters:
            return self.init_lr + (self.max_lr - self.init_lr) * step / self.warmup_iters
        if self.style == "constant":
            return self.max_lr
        if step > self.decay_iters:
            return self.min_lr
        return self.min_lr + self._coefficient(step) * (self.max_lr - self.min_lr)

    def _coefficient(self, step: int) -> float:
        if self.style == "WSD":
            start = self.decay_iters - self.wsd_decay_iters
            return 1.0 if step <= start else _WSD[self.wsd_decay_style]((step - start) / self.wsd_decay_iters)
        ratio = (step - self.warmup_iters) / (self.decay_iters - self.warmup_iters)
        return 1.0 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)


_WSD = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
    "exponential": lambda ratio: 2.0 * 0.5**ratio - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}


def schedule_from_args(args, total_steps: int | None) -> LRSchedule:
    """The schedule of the flags; `total_steps` of the run is the default of --lr-decay-iters.

    Raises:
        ValueError: a decay without a length, or lengths that contradict each other.
    """
    decay_iters = args.lr_decay_iters or total_steps
    if decay_iters is None:
        if args.lr_decay_style != "constant" or args.lr_warmup_fraction is not None:
            raise ValueError(
                f"--lr-decay-style {args.lr_decay_style} needs to know when it ends: set --lr-decay-iters or "
                "--num-rollout"
            )
        decay_iters = 1
    warmup = args.lr_warmup_iters
    if args.lr_warmup_fraction is not None:
        warmup = int(args.lr_warmup_fraction * decay_iters)
    return LRSchedule(
        max_lr=args.lr,
        min_lr=args.min_lr,
        init_lr=args.lr_warmup_init,
        warmup_iters=warmup,
        decay_iters=decay_iters,
        style=args.lr_decay_style,
        wsd_decay_iters=args.lr_wsd_decay_iters or 0,
        wsd_decay_style=args.lr_wsd_decay_style,
    )
