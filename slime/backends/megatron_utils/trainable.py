"""Which Megatron parameters are trained, by the names that the checkpoint has for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from slime.backends.common.trainable import trained_names
from slime.backends.megatron_utils.architecture import Architecture
from slime.backends.megatron_utils.weights import NameMap, global_tensors


def select_trainable(
    chunks: Sequence[nn.Module],
    architecture: Architecture,
    names: Sequence[str],
    only_train: list[str] | None,
    freeze: list[str] | None,
) -> None:
    """Switch gradients off for what `--only-train-params-name-list` leaves out or `--freeze-params-name-list` names.

    Args:
        names: Hugging Face names of all parameters of the model, on whatever rank they are.
        only_train, freeze: regular expressions, found anywhere in a name.

    Raises:
        ValueError: an expression matches no name, nothing is left to train, or only some of the tensors that Megatron
            keeps in one parameter (queries, keys and values; gate and up) would be trained.
    """
    if only_train is None and freeze is None:
        return
    trained = trained_names(names, only_train, freeze)
    rules = NameMap(architecture)
    for name, tensor in global_tensors(chunks).items():
        if not isinstance(tensor, nn.Parameter):
            continue
        parts = rules.source(name).hf_names
        chosen = [part for part in parts if part in trained]
        if chosen and len(chosen) < len(parts):
            left = ", ".join(part for part in parts if part not in trained)
            raise ValueError(
                f"--only-train-params-name-list and --freeze-params-name-list train {', '.join(chosen)}, but not "
                f"{left}: Megatron keeps them in one parameter, {name}; name all of them or none"
            )
        tensor.requires_grad_(bool(chosen))
