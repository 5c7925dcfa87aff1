"""The policy's parameters as full tensors, for weight sync: one collective per bucket, cast on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from slime.backends.fsdp_utils.model import PolicyModel, local_tensor
from slime.weight_sync.buckets import TensorSpec

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardedWeights:
    """`WeightSource` of a policy whose parameters are sharded by rows over a 1-D mesh, or not sharded.

    Args:
        policy: the model.
        dtype: what floating-point weights are sent as.
        mesh: the trainer's ranks.
        device: where the transport's buckets live.
    """

    def __init__(self, policy: PolicyModel, dtype: torch.dtype, mesh: DeviceMesh, device: torch.device):
        self.parameters = policy.hf_parameters()
        self.dtype = dtype
        self.mesh = mesh
        self.device = device

    def tensor_specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(p.shape), self.dtype) for name, p in self.parameters.items()]

    @torch.no_grad()
    def gather(self, specs: Sequence[TensorSpec], out: Sequence[torch.Tensor] | None) -> None:
        parameters = [self.parameters[spec.name] for spec in specs]
        world = self.mesh.size()
        if world == 1 or not isinstance(parameters[0], DTensor):
            if out is not None:
                torch._foreach_copy_(list(out), [local_tensor(p) for p in parameters], non_blocking=True)
                self._settle()
            return
        # Rank r holds rows [r * chunk, (r + 1) * chunk), so the ranks' padded parts, one behind the other, are the
        # tensor with the padding at its end.
        parts = [-(-spec.shape[0] // world) * (spec.numel // max(1, spec.shape[0])) for spec in specs]
        mine = torch.empty(sum(parts), dtype=self.dtype, device=self.device)
        local = [local_tensor(p).reshape(-1) for p in parameters]
        targets = [view[: piece.numel()] for view, piece in zip(mine.split(parts), local, strict=True)]
        torch._foreach_copy_(targets, local, non_blocking=True)
        self._settle()
        everyone = torch.empty(world * mine.numel(), dtype=self.dtype, device=self.device)
        _all_gather(everyone, mine, group=self.mesh.get_group())
        if out is None:
            return
        for target, columns in zip(out, everyone.view(world, -1).split(parts, dim=1), strict=True):
            if columns.numel() == target.numel():
                target.view(columns.shape).copy_(columns)
            else:
                target.copy_(columns.reshape(-1)[: target.numel()].view(target.shape))

    def _settle(self) -> None:
        """Wait for copies out of pinned host memory."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
