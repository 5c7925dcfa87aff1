"""Which experts tokens take in each pass over a rollout: `--use-routing-replay` and the engine's choice.

Megatron's routers record and replay themselves (`RouterReplay`, which gathers weights from the current scores, so the
router keeps its gradient). This module gives each the tokens that its rank has of a row: its context-parallel chunks,
of these its part under sequence parallelism, for the layers of its pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import nn

from slime.backends.megatron_utils.forward import Around
from slime.training.batch import MicroBatch
from slime.training.context_parallel import LocalRow, places
from slime.training.rollout_data import RankData


class RolloutRouting:
    """Routing of one rank's part of a rollout, by micro-batch: all passes have the same.

    Reference and teacher passes leave it off. The pass of the old policy records it, or takes the engine's; training
    replays the same. Layers that are computed again in backward take what their forward took.

    Args:
        chunks: the policy's on this rank, unwrapped.
        from_engine: replay `rollout_routed_experts` instead of recording.
    """

    def __init__(self, chunks: Sequence[nn.Module], from_engine: bool):
        self.from_engine = from_engine
        self.config = chunks[0].config
        self._routers: dict[nn.Module, list[tuple[int, RouterReplay]]] = {
            chunk: [
                (layer.layer_number - 1, layer.mlp.router.router_replay)
                for layer in chunk.decoder.layers
                if hasattr(layer.mlp, "router")
            ]
            for chunk in chunks
        }
        self._kept: dict[tuple[int, nn.Module], list[torch.Tensor]] = {}
        self._first: list[int] = []
        """Of each step: how many micro-batches come before it."""

    def around_log_probs(self, data: RankData) -> Around:
        """For the old policy's pass over all micro-batches of `data`."""
        counts = [len(step) for step in data.steps]
        self._first = [sum(counts[:step]) for step in range(len(counts))]

        @contextmanager
        def around(chunk: nn.Module, index: int, row: LocalRow, batch: MicroBatch) -> Iterator[None]:
            chunk = self._own(chunk)
            if self.from_engine:
                self._replay(chunk, self._of_engine(chunk, batch, row))
                yield
                self._clear(chunk)
                return
            self._act(chunk, RouterReplayAction.RECORD)
            yield
            recorded = [router.get_recorded_indices() for _, router in self._routers[chunk]]
            self._kept[index, chunk] = [experts.to(torch.int16).cpu() for experts in recorded]
            self._clear(chunk)

        return around

    def around_training(self, step: int) -> Around:
        """For the micro-batches of an optimizer step."""
        for chunk in self._routers:
            self._clear(chunk)

        @contextmanager
        def around(chunk: nn.Module, index: int, row: LocalRow, batch: MicroBatch) -> Iterator[None]:
            chunk = self._own(chunk)
            if self.from_engine:
                self._replay(chunk, self._of_engine(chunk, batch, row))
            else:
                self._replay(chunk, self._kept[self._first[step] + index, chunk])
            yield
            # Until the chunk's next forward its layers run again in backward only, oldest micro-batch first.
            self._act(chunk, RouterReplayAction.REPLAY_BACKWARD)

        return around

    def forget(self) -> None:
        """The rollout is trained on."""
        self._kept = {}
        for chunk in self._routers:
            self._clear(chunk)

    def _own(self, chunk: nn.Module) -> nn.Module:
        while chunk not in self._routers:
            chunk = chunk.module
        return chunk

    def _act(self, chunk: nn.Module, action: RouterReplayAction) -> None:
        for _, router in self._routers[chunk]:
            router.set_router_replay_action(action)

    def _replay(self, chunk: nn.Module, experts: list[torch.Tensor]) -> None:
        """Tokens of the chunk's next pass go to these experts [tokens, top k] of each of its layers with experts."""
        for (_, router), chosen in zip(self._routers[chunk], experts, strict=True):
            router.set_target_indices(chosen.long())
        self._act(chunk, RouterReplayAction.REPLAY_FORWARD)

    def _clear(self, chunk: nn.Module) -> None:
        for _, router in self._routers[chunk]:
            router.clear_router_replay_action()
            router.clear_indices()

    def _of_engine(self, chunk: nn.Module, batch: MicroBatch, row: LocalRow) -> list[torch.Tensor]:
        """[tokens, top k] per layer with experts. The last token of a sample never went through the engine.

        Raises:
            ValueError: samples without the engine's routing, or routing of another model.
        """
        top_k, experts = self.config.moe_router_topk, self.config.num_moe_experts
        columns = batch.extra.get("rollout_routed_experts")
        if columns is None:
            raise ValueError(
                "--use-rollout-routing-replay: the samples have no rollout_routed_experts; the rollout function must "
                "ask the engine for them (return_routed_experts)"
            )
        wanted = [layer for layer, _ in self._routers[chunk]]
        # Place 0 is padding, and what the engine did not see: spread over the experts.
        filler = (torch.arange(len(row.tokens) * top_k) % experts).view(-1, 1, top_k)
        numbers = places(batch, row.cp)
        whole = [torch.zeros(1, len(wanted), top_k, dtype=torch.int64)]
        for column, total in zip(columns, batch.total_lengths, strict=True):
            column = torch.as_tensor(column)
            if column.shape[1:] != (self.config.num_layers, top_k):
                raise ValueError(
                    f"--use-rollout-routing-replay: routing of {column.shape[1]} layers to {column.shape[2]} experts, "
                    f"but the model has {self.config.num_layers} layers and top-{top_k}"
                )
            if column.numel() and not 0 <= int(column.min()) <= int(column.max()) < experts:
                raise ValueError(f"--use-rollout-routing-replay: an expert that is not among the {experts}")
            missing = torch.full((total - len(column), len(wanted), top_k), -1)
            whole += [column[:, wanted].long(), missing]
        routing = torch.cat(whole)[numbers]
        routing = torch.where((numbers[:, None, None] > 0) & (routing >= 0), routing, filler)
        if self.config.sequence_parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
            routing = routing.chunk(self.config.tensor_model_parallel_size)[rank]
        return list(routing.to(batch.tokens.device).unbind(1))
