"""The served weights: loading by Hugging Face name in place, releasing, checking.

Released weights that came back without content are refused to serve until each of them has been pushed again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash

from slime.engine.protocol import RequestError

Named = list[tuple[str, torch.Tensor]]
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


class WeightStore:
    """All parameters and persistent buffers of a model by name.

    Args:
        backup: keep a host copy while weights are released.
    """

    def __init__(self, model: torch.nn.Module, backup: bool = False):
        model.requires_grad_(False)
        self.model = model
        self.backup = backup
        self.device = next(model.parameters()).device
        self.tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self.parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self.released = False
        self._host: dict[str, torch.Tensor] = {}
        self._shapes = {name: p.shape for name, p in self.parameters.items()}
        self._missing: dict[int, tuple[str, int]] = {}
        """Parameters without valid content: name and elements still to come, by identity."""
        self._snapshot: dict[str, torch.Tensor] = {}

    @property
    def unusable(self) -> str | None:
        """Why the weights cannot serve, or None."""
        if self.released:
            return "the weights are released: POST /resume_memory_occupation first"
        if self._missing:
            name, _ = next(iter(self._missing.values()))
            return f"{len(self._missing)} weights have no content until they are pushed ({name}, ...)"
        return None

    def load(self, named: Named) -> None:
        """Copy tensors into the model, with a cast to its dtype. All are checked before the first is copied.

        Raises:
            RequestError: an unknown name, a wrong shape, or weights are released.
        """
        targets = [self._target(name, tensor.shape) for name, tensor in named]
        with torch.no_grad():
            for (target, owner), (_, tensor) in zip(targets, named, strict=True):
                target.copy_(tensor, non_blocking=True)
                self._arrived(owner, target.numel())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the sender may free its memory after the reply

    def check_fits(self, name: str, shape: Iterable[int]) -> None:
        """Raise RequestError unless a tensor of that name and shape can be loaded."""
        self._target(name, shape)

    def _target(self, name: str, shape: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor (or slice of a fused one) that `name` stands for, and the tensor that owns its memory."""
        if self.released:
            raise RequestError("the weights are released: POST /resume_memory_occupation with tag weights first")
        owner = target = self.tensors.get(name)
        if owner is None:
            owner, target = self._expert_slice(name)
        if owner is None:
            raise RequestError(f"the model has no weight named {name!r}")
        if torch.Size(shape) != target.shape:
            raise RequestError(f"{name}: shape {tuple(shape)} given, the model has {tuple(target.shape)}")
        return target, owner

    def _expert_slice(self, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """One expert's matrix in a model that stacks experts: gate_up_proj [E, 2 I, D], down_proj [E, D, I]."""
        match = _EXPERT.match(name)
        if match is None:
            return None, None
        prefix, expert, kind = match[1], int(match[2]), match[3]
        owner = self.tensors.get(f"{prefix}.down_proj" if kind == "down_proj" else f"{prefix}.gate_up_proj")
        if owner is None or expert >= len(owner):
            return None, None
        target = owner.detach()[expert]
        if kind != "down_proj":
            half = target.shape[0] // 2
            target = target[:half] if kind == "gate_proj" else target[half:]
        return owner, target

    def _arrived(self, owner: torch.Tensor, count: int) -> None:
        if id(owner) in self._missing:
            name, left = self._missing.pop(id(owner))
            if left > count:
                self._missing[id(owner)] = (name, left - count)

    def load_directory(self, path: Any) -> None:
        """Load the safetensors files of a checkpoint directory; the old weights stay if anything is wrong.

        Raises:
            RequestError: no such checkpoint, or its weights do not fit the model.
        """
        from safetensors import SafetensorError, safe_open

        files = sorted(Path(path).glob("*.safetensors")) if isinstance(path, str) and Path(path).is_dir() else []
        if not files:
            raise RequestError(f"{path!r} is not a directory with *.safetensors files")
        with ExitStack() as stack:
            try:
                opened = [stack.enter_context(safe_open(str(f), framework="pt")) for f in files]
                owners = set()
                for file in opened:
                    for name in file.keys():  # noqa: SIM118 (safe_open is no dict)
                        owners.add(id(self._target(name, file.get_slice(name).get_shape())[1]))
                absent = [name for name, p in self.parameters.items() if id(p) not in owners]
                if absent:
                    raise RequestError(f"{path!r} lacks {len(absent)} weights of the model: {absent[:4]}")
                for file in opened:
                    self.load([(name, file.get_tensor(name)) for name in file.keys()])  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise RequestError(f"{path!r} cannot be read: {error}") from error

    def release(self) -> None:
        """Free the parameters' memory."""
        if self.released:
            return
        if self.backup:
            self._host = {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}
        for p in self.parameters.values():
            p.data = torch.empty(0, dtype=p.dtype, device=p.device)
        self.released = True

    def resume(self) -> None:
        """Allocate the parameters again: with content if it was backed up, else to be pushed before serving."""
        if not self.released:
            return
        for name, p in self.parameters.items():
            p.data = torch.empty(self._shapes[name], dtype=p.dtype, device=p.device)
        self.released = False
        self._all_missing()
        if self.backup:
            self.load(list(self._host.items()))
            self._host = {}

    def check(self, action: Any) -> dict[str, Any]:
        """snapshot: remember; reset_tensors: spoil; compare: raise on any difference; checksum: hash of each tensor.

        Raises:
            RequestError: an unknown action, or `compare` without a snapshot or with differences.
        """
        if self.released:
            raise RequestError("the weights are released: nothing to check")
        if action == "snapshot":
            self._snapshot = {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}
        elif action == "reset_tensors":
            with torch.no_grad():
                for p in self.parameters.values():
                    p.fill_(float("nan") if p.is_floating_point() else 0)
            self._all_missing()
        elif action == "compare":
            self._compare()
        elif action == "checksum":
            return {"ranks": [{"checksums": {name: _checksum(p) for name, p in self.parameters.items()}}]}
        else:
            raise RequestError(f"action must be snapshot, reset_tensors, compare or checksum, got {action!r}")
        return {}

    def _compare(self) -> None:
        if not self._snapshot:
            raise RequestError("compare needs a snapshot first")
        different = [name for name, p in self.parameters.items() if not torch.equal(p.cpu(), self._snapshot[name])]
        if different:
            raise RequestError(f"{len(different)} of {len(self.parameters)} weights differ: {different[:8]}")

    def _all_missing(self) -> None:
        self._missing = {id(p): (name, p.numel()) for name, p in self.parameters.items()}


def _checksum(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return xxhash.xxh3_128_hexdigest(data)
