"""Experts that tokens visited once are visited again: routing of mixture-of-experts layers recorded and replayed.

Training changes the router, and a token that goes to other experts than when its log-prob was taken makes a jump in
the importance ratio that has nothing to do with the policy (arXiv 2507.18071, section 5.3; with the engine's choice,
arXiv 2510.11370). Replay fixes the choice of experts only: their weights are gathered from the current router's
scores, so the router keeps its gradient.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


class RoutingReplay:
    """The routers of a Hugging Face model, changed in place. The stage holds until the next one is set.

    A layer that is computed again in backward must find the stage of its forward: set the next stage after backward.

    Args:
        layers: the model's decoder layers, in order.

    Raises:
        ValueError: the model has no expert layers.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module]):
        config = model.config.get_text_config()
        self.num_experts = next((getattr(config, name) for name in EXPERT_COUNTS if getattr(config, name, None)), 0)
        self.top_k = getattr(config, "num_experts_per_tok", 0)
        found = [(i, m) for i, layer in enumerate(layers) for m in layer.modules() if hasattr(m, "experts")]
        if not found or not self.num_experts or not self.top_k:
            raise ValueError(f"{type(model).__name__} has no expert layers whose routing could be replayed")
        self.num_layers = len(layers)
        self.layers = [index for index, _ in found]
        """Which decoder layers have experts; the first ones of some models have none."""
        self._recorded: dict[int, torch.Tensor] | None = None
        self._given: torch.Tensor | None = None
        for slot, (_, block) in enumerate(found):
            block.forward = MethodType(_replayed(block.forward, self, slot), block)

    def off(self) -> None:
        """Tokens go where the router sends them."""
        self._recorded = self._given = None

    def record(self) -> None:
        """The same, remembered."""
        self._recorded, self._given = {}, None

    def recorded(self) -> torch.Tensor:
        """int16 [tokens, expert layers, top k] of the last forward."""
        slots = range(len(self.layers))
        return torch.stack([self._recorded[slot] for slot in slots], 1).to(torch.int16)

    def replay(self, experts_TLK: torch.Tensor) -> None:
        """Tokens of the next row go to these experts: of the expert layers, or of all decoder layers.

        Raises:
            ValueError: another shape, or an expert that there is not.
        """
        _, layers, top_k = experts_TLK.shape
        if layers == self.num_layers:
            experts_TLK = experts_TLK[:, self.layers]
        elif layers != len(self.layers):
            raise ValueError(f"routing of {layers} layers, but the model has {len(self.layers)} with experts")
        if top_k != self.top_k:
            raise ValueError(f"routing to {top_k} experts per token, but the model has top-{self.top_k}")
        if experts_TLK.numel() and not 0 <= int(experts_TLK.min()) <= int(experts_TLK.max()) < self.num_experts:
            raise ValueError(f"routing names an expert that is not among the {self.num_experts}")
        self._recorded, self._given = None, experts_TLK.long()

    def filler(self, tokens: int) -> torch.Tensor:
        """[tokens, expert layers, top k] for tokens without routing, spread over the experts."""
        count = tokens * self.top_k
        experts = (torch.arange(count) % self.num_experts).view(tokens, 1, self.top_k)
        return experts.expand(-1, len(self.layers), -1)

    def choose(self, slot: int, scores: torch.Tensor, topk) -> torch.return_types.topk:
        """What the router's `torch.topk` gives: recorded, or replayed with the current scores."""
        if self._given is not None:
            indices = self._given[:, slot].view(*scores.shape[:-1], self.top_k)
            return torch.return_types.topk((scores.gather(-1, indices), indices))
        result = topk()
        self._recorded[slot] = result.indices.detach().reshape(-1, self.top_k)
        return result

    @property
    def active(self) -> bool:
        return self._recorded is not None or self._given is not None


class _Router(TorchFunctionMode):
    """Sees the `torch.topk` by which a layer picks its experts, however its router is written."""

    def __init__(self, replay: RoutingReplay, slot: int):
        super().__init__()
        self.replay, self.slot = replay, slot

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            scores, k = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs["k"]
            if k == self.replay.top_k and scores.shape[-1] == self.replay.num_experts:
                return self.replay.choose(self.slot, scores, lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


def _replayed(forward, replay: RoutingReplay, slot: int):
    def call(self: nn.Module, *args, **kwargs):
        if not replay.active:
            return forward(*args, **kwargs)
        with _Router(replay, slot):
            return forward(*args, **kwargs)

    return call
