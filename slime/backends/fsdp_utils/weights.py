"""The policy's parameters as full tensors, for weight sync: one collective per bucket, cast on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from slime.backends.fsdp_utils.lora import LoraOptions, split_adapters
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
        scale: of adapters, if there are any; they are merged on the way.
    """

    def __init__(
        self, policy: PolicyModel, dtype: torch.dtype, mesh: DeviceMesh, device: torch.device, scale: float = 1.0
    ):
        self.parameters, self.adapters = split_adapters(policy.hf_parameters())
        self.scale = scale
        self.dtype = dtype
        self.mesh = mesh
        self.device = device

    def tensor_specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(p.shape), self.dtype) for name, p in self.parameters.items()]

    @torch.no_grad()
    def gather(self, specs: Sequence[TensorSpec], out: Sequence[torch.Tensor] | None) -> None:
        plain = [i for i, spec in enumerate(specs) if spec.name not in self.adapters]
        if plain:
            targets = None if out is None else [out[i] for i in plain]
            self.gather_parameters([self.parameters[specs[i].name] for i in plain], targets, self.dtype)
        for i, spec in enumerate(specs):
            if spec.name in self.adapters:
                self._merge(spec, None if out is None else out[i])

    def _merge(self, spec: TensorSpec, out: torch.Tensor | None) -> None:
        """The weight with its adapter, added in fp32 or better."""
        adapter = self.adapters[spec.name]
        parts = [self.parameters[spec.name], adapter.a, adapter.b]
        dtype = torch.promote_types(torch.float32, adapter.a.dtype)
        full = None
        if out is not None:
            full = [torch.empty(tuple(p.shape), dtype=dtype, device=self.device) for p in parts]
        self.gather_parameters(parts, full, dtype)
        if out is not None:
            base, a, b = full
            out.copy_(base.addmm_(b, a, alpha=self.scale))

    def gather_parameters(
        self, parameters: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None, dtype: torch.dtype
    ) -> None:
        """Full `parameters` into `out`; collective."""
        world = self.mesh.size()
        if world == 1 or not isinstance(parameters[0], DTensor):
            if out is not None:
                torch._foreach_copy_(list(out), [local_tensor(p) for p in parameters], non_blocking=True)
                self._settle()
            return
        # Rank r holds rows [r * chunk, (r + 1) * chunk), so the ranks' padded parts, one behind the other, are the
        # tensor with the padding at its end.
        parts = [-(-p.shape[0] // world) * (p.numel() // max(1, p.shape[0])) for p in parameters]
        mine = torch.empty(sum(parts), dtype=dtype, device=self.device)
        local = [local_tensor(p).reshape(-1) for p in parameters]
        targets = [view[: piece.numel()] for view, piece in zip(mine.split(parts), local, strict=True)]
        torch._foreach_copy_(targets, local, non_blocking=True)
        self._settle()
        everyone = torch.empty(world * mine.numel(), dtype=dtype, device=self.device)
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


class AdapterWeights:
    """The adapters alone, under peft's names (`slime.weight_sync.adapter.AdapterSource`)."""

    def __init__(self, weights: ShardedWeights, options: LoraOptions):
        self.weights = weights
        self.options = options
        self.parameters: dict[str, torch.Tensor] = {}
        for name, adapter in weights.adapters.items():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            self.parameters[f"{stem}.lora_A.weight"] = adapter.a
            self.parameters[f"{stem}.lora_B.weight"] = adapter.b

    def tensor_specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(p.shape), self.weights.dtype) for name, p in self.parameters.items()]

    @torch.no_grad()
    def gather(self, specs: Sequence[TensorSpec], out: Sequence[torch.Tensor] | None) -> None:
        self.weights.gather_parameters([self.parameters[spec.name] for spec in specs], out, self.weights.dtype)

    def config(self) -> dict[str, Any]:
        """As in peft's adapter_config.json."""
        targets = sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in self.weights.adapters})
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.options.rank,
            "lora_alpha": self.options.alpha,
            "target_modules": targets,
            "bias": "none",
        }
