"""Which routing the expert layers take in each pass over a rollout: `--use-routing-replay` and the engine's."""

from __future__ import annotations

from dataclasses import replace

import torch

from slime.modeling.routing_replay import RoutingReplay
from slime.training.batch import MicroBatch
from slime.training.context_parallel import ContextParallel, chunk_length, local_row


class RolloutRouting:
    """Routing of one rank's samples, by their index in the rank's part.

    Reference and teacher passes leave it off. The pass of the old policy records it, or takes the engine's; training
    replays the same.

    Args:
        from_engine: replay `rollout_routed_experts` instead of recording.
    """

    def __init__(self, routing: RoutingReplay, from_engine: bool, cp: ContextParallel):
        self.routing = routing
        self.from_engine = from_engine
        self.cp = cp
        self._kept: dict[int, torch.Tensor] = {}

    def off(self) -> None:
        self.routing.off()

    def forget(self) -> None:
        """The rollout is trained on."""
        self._kept = {}
        self.off()

    def before_log_probs(self, batch: MicroBatch) -> None:
        if not batch.total_lengths:
            self.off()
        elif self.from_engine:
            self.routing.replay(self._of_engine(batch))
        else:
            self.routing.record()

    def after_log_probs(self, batch: MicroBatch, samples: list[int]) -> None:
        if samples and not self.from_engine:
            size = self.cp.size
            lengths = [n if size == 1 else 2 * chunk_length(n, size) for n in batch.total_lengths]
            self._kept.update(zip(samples, self.routing.recorded().cpu().split(lengths), strict=True))
        self.off()

    def before_training(self, batch: MicroBatch, samples: list[int]) -> None:
        """Holds until the next stage is set, so that layers that are computed again in backward find it."""
        if not samples:
            self.off()
        elif self.from_engine:
            self.routing.replay(self._of_engine(batch))
        else:
            self.routing.replay(torch.cat([self._kept[i] for i in samples]).to(batch.tokens.device))

    def _of_engine(self, batch: MicroBatch) -> torch.Tensor:
        """[tokens of the rank's row, layers, top k]. The last token of a sample never went through the engine.

        Raises:
            ValueError: samples without the engine's routing.
        """
        columns = batch.extra.get("rollout_routed_experts")
        if columns is None:
            raise ValueError(
                "--use-rollout-routing-replay: the samples have no rollout_routed_experts; the rollout function must "
                "ask the engine for them (return_routed_experts)"
            )
        whole = []
        for experts, total in zip(columns, batch.total_lengths, strict=True):
            experts = torch.as_tensor(experts)
            missing = self.routing.filler(total - len(experts))
            if experts.shape[1] == self.routing.num_layers:
                experts = experts[:, self.routing.layers]
            whole.append(torch.cat([experts.to(missing.dtype), missing]))
        routing = torch.cat(whole)
        places = replace(batch, tokens=torch.arange(len(batch.tokens)))
        return routing[local_row(places, self.cp).tokens].to(batch.tokens.device)
