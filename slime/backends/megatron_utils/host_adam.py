"""AdamW whose moments live in host memory and which steps there (`--optimizer-cpu-offload`)."""

from __future__ import annotations

import torch


class HostAdamW(torch.optim.AdamW):
    """In the place of `optimizer`: the same parameters and groups, 8 bytes per parameter less on the device.

    Parameters stay where they are. They and their gradients are copied to (pinned) host memory for a step, and the
    result back. `state` holds the moments as torch's AdamW does, so that checkpoints are the same.
    """

    def __init__(self, optimizer: torch.optim.AdamW):
        self.__dict__.update(optimizer.__dict__)  # parameters may be views, which a new optimizer does not take
        self._copies = {p: on_host(p) for group in self.param_groups for p in group["params"]}
        self._host = torch.optim.AdamW(
            [
                {**group, "params": [self._copies[p] for p in group["params"]], "fused": True, "foreach": False}
                for group in self.param_groups
            ]
        )

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group, host_group in zip(self.param_groups, self._host.param_groups, strict=True):
            host_group |= {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        for parameter, copy in self._copies.items():
            self._host.state[copy] = self.state[parameter]  # one dictionary for both
            copy.copy_(parameter, non_blocking=True)
            if parameter.grad is None:
                copy.grad = None
                continue
            if copy.grad is None:
                copy.grad = on_host(parameter)
            copy.grad.copy_(parameter.grad, non_blocking=True)
        self._settle()
        self._host.step()
        for parameter, copy in self._copies.items():
            parameter.copy_(copy, non_blocking=True)
        self._settle()

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, but the moments stay in host memory: torch moves them to where the parameters are."""
        super().load_state_dict({**state_dict, "state": {}})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if key in state_dict["state"]:
                state = state_dict["state"][key]
                self.state[parameter] = {name: on_host(x).copy_(x) if x.is_cuda else x for name, x in state.items()}

    def _settle(self) -> None:
        """Wait for copies between pinned host memory and the device."""
        if any(parameter.is_cuda for parameter in self._copies):
            torch.cuda.synchronize()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Like `tensor`, in host memory, pinned if that is on a GPU; not initialised."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
