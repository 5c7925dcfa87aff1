"""AdamW, learning-rate schedules and gradient clipping over sharded parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from slime.backends.fsdp_utils.model import local_tensor


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


class Optimizer:
    """AdamW with schedule and clipping; one `step` per global batch.

    Weight decay applies to matrices only, not to biases and norm weights. A step whose gradient norm is not finite is
    skipped: parameters, moments and schedule stay as they are.

    Args:
        parameters: by name; sharded or plain.
        group: ranks that the parameters are sharded over, None when each rank holds all.
        host: keep the moments in host memory and compute the step there (`--optimizer cpu_adam`). Parameters stay
            where they are; they and their gradients are copied.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        schedule: LRSchedule,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_grad: float,
        group: dist.ProcessGroup | None,
        host: bool = False,
    ):
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.schedule = schedule
        self.clip_grad = clip_grad
        self.group = group
        self.steps_done = 0
        self.host = host
        self._stepped = {name: _on_host(p) for name, p in self.parameters.items()} if host else self.parameters
        matrices = [p for p in self._stepped.values() if p.ndim > 1]
        others = [p for p in self._stepped.values() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=schedule.lr(0), betas=betas, eps=eps, fused=True
        )

    @property
    def lr(self) -> float:
        """The rate that the next step uses."""
        return self.schedule.lr(self.steps_done)

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip, update, clear gradients. Returns `grad_norm` (before clipping), `lr-pg_{i}`, `skipped_steps`."""
        lr = self.lr
        norm = self.grad_norm()
        skipped = not math.isfinite(norm)
        if not skipped:
            if 0 < self.clip_grad < norm:
                grads = [local_tensor(p.grad) for p in self.parameters.values() if p.grad is not None]
                torch._foreach_mul_(grads, self.clip_grad / (norm + 1e-6))
            for group in self.adam.param_groups:
                group["lr"] = lr
            self._update()
            self.steps_done += 1
        for parameter in self.parameters.values():
            parameter.grad = None
        rates = {f"lr-pg_{i}": lr for i in range(len(self.adam.param_groups))}
        return {"grad_norm": norm, **rates, "skipped_steps": float(skipped)}

    def _update(self) -> None:
        """AdamW's step, where its state is."""
        if not self.host:
            self.adam.step()
            return
        pairs = [(self.parameters[name], copy) for name, copy in self._stepped.items()]
        for parameter, copy in pairs:
            local_tensor(copy).copy_(local_tensor(parameter), non_blocking=True)
            if parameter.grad is None:
                copy.grad = None
                continue
            if copy.grad is None:
                copy.grad = _empty_on_host(parameter)
            local_tensor(copy.grad).copy_(local_tensor(parameter.grad), non_blocking=True)
        self._settle()
        self.adam.step()
        for parameter, copy in pairs:
            local_tensor(parameter).copy_(local_tensor(copy), non_blocking=True)
        self._settle()

    def _settle(self) -> None:
        """Wait for copies between pinned host memory and the device."""
        if any(local_tensor(parameter).is_cuda for parameter in self.parameters.values()):
            torch.cuda.synchronize()

    def grad_norm(self) -> float:
        """Global L2 norm over all parameters and ranks."""
        grads = [local_tensor(p.grad) for p in self.parameters.values() if p.grad is not None]
        if not grads:
            return 0.0
        squares = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        if self.group is not None:
            dist.all_reduce(squares, group=self.group)
        return squares.sqrt().item()

    def ensure_state(self) -> None:
        """Create AdamW's state as its first step would, so that a checkpoint can be read into it."""
        for parameter in self._stepped.values():
            if not self.adam.state[parameter]:
                self.adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=local_tensor(parameter).device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }

    def reset_state(self) -> None:
        """Forget the moments, in place: the next step is AdamW's first."""
        for state in self.adam.state.values():
            for value in state.values():
                value.zero_()

    def state_by_name(self) -> dict[str, dict[str, torch.Tensor]]:
        """`{parameter name: {"step", "exp_avg", "exp_avg_sq"}}`, the tensors themselves."""
        self.ensure_state()
        return {name: dict(self.adam.state[parameter]) for name, parameter in self._stepped.items()}

    def local_tensors(self) -> list[torch.Tensor]:
        """This rank's parts of the moments, for offloading; nothing when they are in host memory already."""
        if self.host:
            return []
        states = self.adam.state.values()
        return [local_tensor(value) for state in states for value in state.values() if value.ndim > 0]


def _empty_on_host(parameter: torch.Tensor) -> torch.Tensor:
    """Like `parameter`, sharded alike, in (pinned) host memory."""
    return torch.empty_like(parameter, device="cpu", pin_memory=local_tensor(parameter).is_cuda, requires_grad=False)


def _on_host(parameter: nn.Parameter) -> nn.Parameter:
    """A copy that AdamW steps on in host memory."""
    return nn.Parameter(_empty_on_host(parameter))
