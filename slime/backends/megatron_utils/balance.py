"""Load balance of Megatron's routers: metrics of every step, and the auxiliary loss of `--moe-aux-loss-coeff`.

The loss is the one of both trainers (`slime.training.expert_balance`), over the real tokens of a whole micro-batch:
each rank has those of its context-parallel chunks, of these its part under sequence parallelism. Megatron's own counts
padding, and has one factor for all micro-batches. Its gradient enters as Megatron's does, beside that of the router's
output, so that it passes pipeline stages and layers that are computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from slime.backends.megatron_utils.forward import Around
from slime.training.batch import MicroBatch
from slime.training.context_parallel import LocalRow, places
from slime.training.expert_balance import Balance, expert_balance
from slime.training.reducers import make_reducer


@dataclass
class Pass:
    """A chunk's forward pass over a micro-batch."""

    rows: torch.Tensor
    """int64: which of the rank's tokens are real."""
    share: torch.Tensor
    """The micro-batch's part of the step's loss."""
    layers: list[Balance] = field(default_factory=list)


class BalancedRouter(TopKRouter):
    """Also keeps the balance of each pass that it is told of, and pushes towards it."""

    current: Pass | None = None
    coefficient = 0.0
    """Of the layer's loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.to_recompute: deque[Pass] = deque()
        """Passes without gradients: their layers are computed again in backward, oldest first."""

    def routing(self, logits: torch.Tensor, *args, **kwargs):
        probs, routing_map = super().routing(logits, *args, **kwargs)
        first, with_gradient = self.current is not None, torch.is_grad_enabled()
        if not first and not (with_gradient and self.to_recompute):
            return probs, routing_map
        of = self.current if first else self.to_recompute.popleft()
        with_loss = with_gradient and self.coefficient != 0
        if first and not with_gradient:
            self.to_recompute.append(of)
        if first or with_loss:
            real_TE = logits.flatten(0, -2)[of.rows]
            balance = expert_balance(real_TE if with_loss else real_TE.detach(), self.topk, self.tp_cp_group)
            if first:
                of.layers.append(Balance(balance.loss.detach(), balance.max_load))
            if with_loss:
                probs = MoEAuxLossAutoScaler.apply(probs, self.coefficient * of.share * balance.loss)
        return probs, routing_map


class Balancing:
    """The routers of one rank's chunks in an optimizer step.

    Args:
        chunks: unwrapped.
        moe_layers: of the whole model.
        coefficient: of the auxiliary loss, which is the mean of the layers'.
        per_token: how the loss is reduced (`--calculate-per-token-loss`).
    """

    def __init__(self, chunks: Sequence[nn.Module], moe_layers: int, coefficient: float, per_token: bool):
        self.config = chunks[0].config
        self.moe_layers = moe_layers
        self.per_token = per_token
        self._routers = {
            chunk: [module for module in chunk.decoder.modules() if isinstance(module, BalancedRouter)]
            for chunk in chunks
        }
        for router in self._all():
            router.coefficient = coefficient / moe_layers
        self._passes: dict[int, list[Pass]] = {}

    def around_training(self) -> Around:
        """For the micro-batches of an optimizer step."""
        self._passes = {}
        for router in self._all():
            router.to_recompute.clear()
        return self._around

    @contextmanager
    def _around(self, chunk: nn.Module, index: int, row: LocalRow, batch: MicroBatch) -> Iterator[None]:
        while chunk not in self._routers:
            chunk = chunk.module
        of = Pass(self._rows(batch, row), make_reducer(batch, self.per_token)(torch.ones_like(batch.loss_masks)))
        self._passes.setdefault(index, []).append(of)
        for router in self._routers[chunk]:
            router.current = of
        yield
        for router in self._routers[chunk]:
            router.current = None

    def metrics(self) -> list[dict[str, torch.Tensor]]:
        """Of each micro-batch of the step, in order: its part of the step's metrics. Collective over stages."""
        of_layers = [[layer for of in self._passes[index] for layer in of.layers] for index in sorted(self._passes)]
        shares = torch.stack([self._passes[index][0].share for index in sorted(self._passes)])
        zero = shares.new_zeros(())
        losses = torch.stack([sum((layer.loss for layer in layers), zero) for layers in of_layers])
        loads = torch.stack([torch.stack([zero, *(layer.max_load for layer in layers)]).max() for layers in of_layers])
        stages = parallel_state.get_pipeline_model_parallel_group()
        dist.all_reduce(losses, group=stages)
        dist.all_reduce(loads, dist.ReduceOp.MAX, group=stages)
        parts = zip(shares * losses / self.moe_layers, shares * loads, strict=True)
        return [{"moe_aux_loss": loss, "moe_max_load": load} for loss, load in parts]

    def _rows(self, batch: MicroBatch, row: LocalRow) -> torch.Tensor:
        real = places(batch, row.cp) > 0
        if self.config.sequence_parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
            real = real.chunk(self.config.tensor_model_parallel_size)[rank]
        return real.nonzero().squeeze(-1).to(batch.tokens.device)

    def _all(self) -> Iterator[BalancedRouter]:
        for routers in self._routers.values():
            yield from routers
