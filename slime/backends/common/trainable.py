"""Which parameters are trained, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHOWN_NAMES = 8


def trained_names(names: Sequence[str], only_train: list[str] | None, freeze: list[str] | None) -> set[str]:
    """Those of `names` that are trained; see `select_trainable` of the backends."""
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
