"""AdamW as Megatron's optimizer holds it, a chunk of parameters at a time: on the device with moments of fewer bits
(`--use-precision-aware-optimizer`), or with moments in host memory, where it steps (`--optimizer-cpu-offload`).

torch's own AdamW makes temporary tensors as large as all parameters together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class ChunkedAdamW(torch.optim.AdamW):
    """In the place of `optimizer`: the same parameters, groups and, with moments like the parameters, the same bits.

    Args:
        dtypes: of `exp_avg` and `exp_avg_sq`, where they are not the parameters'. A step computes in the dtype of the
            parameters and rounds the moments once, to the nearest: ranks that hold the same parameter must agree.
    """

    chunk = 2**27
    """Elements that are stepped together, at least one parameter."""

    def __init__(self, optimizer: torch.optim.AdamW, dtypes: Mapping[str, torch.dtype] | None = None):
        self.__dict__.update(optimizer.__dict__)  # parameters may be views, which a new optimizer does not take
        self._dtypes = dict(dtypes or {})

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Before the first step."""
        return {"step": torch.tensor(0.0)} | {name: self._moment(parameter, name).zero_() for name in MOMENTS}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group, parameters in self._chunks():
            states = [self._state_of(parameter) for parameter in parameters]
            _update(group, parameters, [parameter.grad for parameter in parameters], states)

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, but moments stay where and as narrow as they are: torch makes them like the parameters."""
        super().load_state_dict({**state_dict, "state": {}})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if key in state_dict["state"]:
                state = dict(state_dict["state"][key])
                for name in MOMENTS:
                    if name in state:
                        state[name] = self._taken_over(parameter, name, state[name])
                self.state[parameter] = state

    def _taken_over(self, parameter: torch.Tensor, name: str, moment: torch.Tensor) -> torch.Tensor:
        """A moment that was loaded; itself if it is as it should be, since all of them twice may not fit."""
        wanted = self._moment(parameter.new_empty(0), name)
        if (moment.dtype, moment.device) == (wanted.dtype, wanted.device):
            return moment
        return self._moment(parameter, name).copy_(moment)

    def _moment(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        return torch.empty_like(parameter, dtype=self._dtypes.get(name), requires_grad=False)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state |= self.new_state(parameter)
        return state

    def _chunks(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Parameters with gradients, in their order, and the group that they are of."""
        for group in self.param_groups:
            parameters, size = [], 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameters and size + parameter.numel() > self.chunk:
                    yield group, parameters
                    parameters, size = [], 0
                parameters.append(parameter)
                size += parameter.numel()
            if parameters:
                yield group, parameters


class HostAdamW(ChunkedAdamW):
    """Moments in (pinned) host memory: 8 bytes per parameter less on the device.

    Parameters stay where they are. They and their gradients are copied to host memory for a step, and the result back,
    while the chunks before and after are computed.
    """

    chunk = 2**24

    def __init__(self, optimizer: torch.optim.AdamW):
        super().__init__(optimizer)
        self._copies = {p: on_host(p) for group in self.param_groups for p in group["params"]}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        on_gpu = any(parameter.is_cuda for parameter in self._copies)
        chunks = [(*chunk, self._fetch(chunk[1])) for chunk in self._chunks()]
        for group, parameters, fetched in chunks:
            if fetched is not None:
                fetched.synchronize()
            copies = [self._copies[parameter] for parameter in parameters]
            gradients = [self._gradients[parameter] for parameter in parameters]
            _update(group, copies, gradients, [self._state_of(parameter) for parameter in parameters], fused=True)
            for parameter, copy in zip(parameters, copies, strict=True):
                parameter.copy_(copy, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

    def _fetch(self, parameters: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
        """Start copying parameters and gradients to host memory; the event of their arrival, if any."""
        for parameter in parameters:
            if parameter not in self._gradients:
                self._gradients[parameter] = on_host(parameter)
            self._copies[parameter].copy_(parameter, non_blocking=True)
            self._gradients[parameter].copy_(parameter.grad, non_blocking=True)
        return torch.cuda.current_stream().record_event() if parameters[0].is_cuda else None

    def _moment(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        return on_host(parameter)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Like `tensor`, in host memory, pinned if that is on a GPU; not initialised."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _update(
    group: Mapping[str, Any],
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    states: Sequence[dict[str, torch.Tensor]],
    fused: bool | None = None,
) -> None:
    """AdamW (arXiv 1711.05101, Algorithm 2) in place; `states` may hold moments of another dtype."""
    moments = {
        name: [state[name].to(parameter.dtype) for state, parameter in zip(states, parameters, strict=True)]
        for name in MOMENTS
    }
    adamw(
        parameters,
        gradients,
        moments["exp_avg"],
        moments["exp_avg_sq"],
        [],
        [state["step"] for state in states],
        fused=fused,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for name, values in moments.items():
        for state, value in zip(states, values, strict=True):
            if state[name] is not value:
                state[name].copy_(value)
