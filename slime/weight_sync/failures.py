"""A failure on one trainer rank, made known to all: the others would wait for it in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slime.weight_sync.engines import WeightSyncError


def error_of(action: Callable[[], Any]) -> WeightSyncError | None:
    """Run `action`; the error when an engine failed it."""
    try:
        action()
    except WeightSyncError as error:
        return error
    return None


def raise_on_all_ranks(failure: WeightSyncError | None, group: dist.ProcessGroup | None = None) -> None:
    """A barrier; if any rank has a failure, every rank raises: its own, or the first that another one has.

    Raises:
        WeightSyncError: see above.
    """
    failed = torch.tensor([int(failure is not None)])
    if dist.get_world_size(group) > 1:
        dist.all_reduce(failed, group=group)
    if not failed.item():
        return
    messages: list[str | None] = [None] * dist.get_world_size(group)
    if len(messages) > 1:
        dist.all_gather_object(messages, None if failure is None else str(failure), group=group)
    if failure is not None:
        raise failure
    rank, message = next((i, text) for i, text in enumerate(messages) if text is not None)
    raise WeightSyncError(f"trainer rank {rank} could not send its weights: {message}")
