"""The router logits of a transformers MoE model, for its load balance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from slime.training.batch import MicroBatch
from slime.training.context_parallel import ContextParallel, places
from slime.training.expert_balance import Balance, expert_balance


class RouterTap:
    """Records the router logits of a transformers MoE model. Nothing of a model without routers."""

    def __init__(self, model: PreTrainedModel, cp: ContextParallel):
        self.cp = cp
        self._top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        self._logits: list[torch.Tensor] | None = None
        self.found = False
        for inner in model.modules():
            if not isinstance(inner, PreTrainedModel) or not inner._can_record_outputs:
                continue
            recorder = inner._can_record_outputs.get("router_logits")
            if recorder is not None:
                self._watch(inner, recorder.target_class, recorder.index)

    def _watch(self, model: nn.Module, kind: type[nn.Module], index: int) -> None:
        def record(module, inputs, output) -> None:
            if self._logits is not None:
                logits = output[index] if isinstance(output, tuple) else output
                self._logits.append(logits.reshape(-1, logits.shape[-1]))

        for module in model.modules():
            if isinstance(module, kind):
                module.register_forward_hook(record)
                self.found = True

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """The list that a forward pass fills: [tokens, experts] per layer. Recomputation in backward adds nothing."""
        self._logits = logits = []
        try:
            yield logits
        finally:
            self._logits = None

    def balance(self, logits: list[torch.Tensor], batch: MicroBatch) -> Balance:
        """Of what was recorded of a micro-batch: the mean loss of its layers, the largest load of any."""
        if self.cp.size > 1:
            rows = places(batch, self.cp).nonzero().squeeze(-1).to(batch.tokens.device)
            logits = [logits_TE[rows] for logits_TE in logits]
        layers = [expert_balance(logits_TE, self._top_k, self.cp.group) for logits_TE in logits]
        loss, max_load = (torch.stack(values) for values in zip(*((x.loss, x.max_load) for x in layers), strict=True))
        return Balance(loss.mean(), max_load.max())
