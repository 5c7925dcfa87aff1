"""How old samples may get: which prompts may be started, and which finished groups may be trained on first.

A group may be trained on with weights at most `limit` versions newer than its oldest token. No work is thrown away for
that: a prompt is held back until its group surely fits into a rollout in time, and a rollout waits for a group that no
later one may take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slime.rollout.errors import RolloutError
from slime.rollout.generation import router_url
from slime.utils.http_utils import get
from slime.utils.misc import flatten


class StalenessBound:
    """Earliest-deadline-first admission (Liu and Layland 1973): what is admitted can always be delivered in time.

    Args:
        limit: `--max-weight-staleness`; None is no bound.
        batch: groups per rollout.
        interval: rollouts per weight version.
    """

    def __init__(self, limit: int | None, batch: int, interval: int = 1) -> None:
        self.limit = limit
        self.batch = batch
        self.interval = interval
        self.version = 0
        self._taken = 0

    def begin(self, version: int, rollout_id: int) -> None:
        """A rollout starts; the engines hold `version`, with which it will be trained."""
        self.version = version
        self._taken = rollout_id % self.interval

    def delivered(self) -> None:
        """The rollout is complete; until the next one begins the engines may still hold its version."""
        self._taken += 1

    def room(self, outstanding: int) -> int | None:
        """How many more groups may be started when `outstanding` are running or wait to be taken; None: any number."""
        if self.limit is None:
            return None
        return max(0, self._capacity(self.limit) - outstanding)

    def may_deliver(self, running: Sequence[int], left: Sequence[int]) -> bool:
        """Whether a rollout may be closed that leaves behind groups with these oldest versions.

        Args:
            running: of the groups that still run.
            left: of all groups that the rollout does not take, running ones included.
        """
        if self.limit is None:
            return True
        for ahead in range(self.limit + 1):
            oldest = self.version + ahead - self.limit
            due = sum(version <= oldest for version in left)
            # When nothing that is due still runs, waiting cannot help.
            if due > self._capacity(ahead) - self.batch and any(version <= oldest for version in running):
                return False
        return True

    def _capacity(self, ahead: int) -> int:
        """Groups that rollouts take, from now on, while the version is at most `ahead` above the present one."""
        return ((ahead + 1) * self.interval - self._taken) * self.batch


def oldest_version(group: Iterable, current: int) -> int:
    """The oldest weights that generated tokens of a group; `current` when it has none."""
    versions = [_number(span[0]) for sample in flatten(group) for span in sample.weight_version_spans]
    return min([current, *versions])


async def engine_weight_version(args) -> int:
    """The weight version that the engines serve; between updates it is the same for all.

    Raises:
        RolloutError: it is not a number, so no age can be told from it.
    """
    info = await get(f"{router_url(args)}/get_model_info")
    return _number(str(info["weight_version"]))


def _number(version: str) -> int:
    if not version.isdigit():
        raise RolloutError(f"the engine's weight version {version!r} is not a number, so the age of tokens is unknown")
    return int(version)
