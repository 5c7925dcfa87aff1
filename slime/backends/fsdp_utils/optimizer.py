"""AdamW and gradient clipping over sharded parameters."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from slime.backends.common.lr_schedule import LRSchedule
from slime.backends.fsdp_utils.model import local_tensor


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
