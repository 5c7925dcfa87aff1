"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: injected into the model, found again, merged, exported.

The base stays as it is, so the reference needs no second copy: adapters start with B = 0, which is the base exactly,
and a reference is a copy of adapters. Engines get merged weights under the base's names and know nothing of adapters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

ADAPTER = "default"
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraOptions:
    """Which modules get adapters, and how large."""

    rank: int
    alpha: float
    """The adapter's output is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Endings of module names; `all-linear` means every linear layer but the output layer."""
    exclude_modules: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def config(self):
        """As peft's LoraConfig."""
        from peft import LoraConfig

        everything = self.target_modules == (ALL_LINEAR,)
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=ALL_LINEAR if everything else list(self.target_modules),
            exclude_modules=list(self.exclude_modules) or None,
            task_type="CAUSAL_LM",
        )


def add_adapters(model: nn.Module, options: LoraOptions, frozen_dtype: torch.dtype) -> nn.Module:
    """Put adapters into the target modules, in place; nothing else is trained from then on.

    Args:
        frozen_dtype: of the weights that are not trained. Only what computes needs to be kept of them.

    Raises:
        ValueError: no module has one of the target names.
    """
    from peft import inject_adapter_in_model

    inject_adapter_in_model(options.config(), model, adapter_name=ADAPTER)
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(frozen_dtype)
    return model


@dataclass(frozen=True)
class Adapter:
    """The change of one weight: scale * B @ A."""

    a: nn.Parameter
    """[rank, in]."""
    b: nn.Parameter
    """[out, rank]."""


def has_adapters(parameters: Mapping[str, nn.Parameter]) -> bool:
    return any(f".lora_A.{ADAPTER}." in name for name in parameters)


def split_adapters(parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, nn.Parameter], dict[str, Adapter]]:
    """(the base's parameters, adapters by the base's name of the weight that they change)."""
    base = {name.replace(".base_layer.", "."): p for name, p in parameters.items() if ".lora_" not in name}
    end = f".lora_A.{ADAPTER}.weight"
    stems = [name.removesuffix(end) for name in parameters if name.endswith(end)]
    adapters = {
        f"{stem}.weight": Adapter(parameters[f"{stem}{end}"], parameters[f"{stem}.lora_B.{ADAPTER}.weight"])
        for stem in stems
    }
    return base, adapters


def write_adapter(directory: Path, adapters: dict[str, torch.Tensor], options: LoraOptions, base: str) -> None:
    """peft's files: adapter_model.safetensors and adapter_config.json.

    Args:
        adapters: full tensors under the trainer's names.
        base: the checkpoint directory that they belong to.
    """
    from safetensors.torch import save_file

    directory.mkdir()
    names = {name: f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}" for name in adapters}
    save_file(
        {names[name]: tensor.contiguous() for name, tensor in adapters.items()},
        directory / "adapter_model.safetensors",
    )
    config = options.config()
    config.base_model_name_or_path = base
    config.inference_mode = True
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2, default=str) + "\n")
