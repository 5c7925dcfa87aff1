"""Which parameters are trained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

SHOWN_NAMES = 8


def select_trainable(
    parameters: Mapping[str, nn.Parameter], only_train: list[str] | None, freeze: list[str] | None
) -> None:
    """Switch gradients off for what `--only-train-params-name-list` leaves out or `--freeze-params-name-list` names.

    Args:
        parameters: by Hugging Face name.
        only_train, freeze: regular expressions, found anywhere in a name.

    Raises:
        ValueError: an expression matches no name (the message shows some), or nothing is left to train.
    """
    trained = trained_names(list(parameters), only_train, freeze)
    for name, parameter in parameters.items():
        parameter.requires_grad_(parameter.requires_grad and name in trained)


def trained_names(names: Sequence[str], only_train: list[str] | None, freeze: list[str] | None) -> set[str]:
    """Those of `names` that are trained; arguments and errors as in `select_trainable`."""
    trained = set(names)
    if only_train is not None:
        trained = _matching(names, only_train, "--only-train-params-name-list")
    if freeze is not None:
        trained -= _matching(names, freeze, "--freeze-params-name-list")
    if not trained:
        raise ValueError("--only-train-params-name-list and --freeze-params-name-list leave no parameter to train")
    return trained


def _matching(names: Sequence[str], expressions: list[str], flag: str) -> set[str]:
    found: set[str] = set()
    for expression in expressions:
        matching = {name for name in names if re.search(expression, name)}
        if not matching:
            step = max(1, len(names) // SHOWN_NAMES)
            some = ", ".join(names[::step][:SHOWN_NAMES])
            raise ValueError(f"{flag}: {expression!r} matches none of the {len(names)} parameters ({some}, ...)")
        found |= matching
    return found
