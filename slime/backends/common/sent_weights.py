"""The weights that the engines were sent last."""

from __future__ import annotations

from slime.backends.common.host_memory import HostCopy

KEPT_VERSIONS = 2
"""An asynchronous loop trains on samples of the version before the one that the engines serve."""


class SentWeights:
    """The weights of the last versions that the engines were sent (`--keep-old-actor`).

    Args:
        trained: the parameters that change, in the model; copies of them are what is kept.
    """

    def __init__(self, trained: HostCopy):
        self._trained = trained
        self._versions: dict[int, tuple[HostCopy, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._versions)

    def remember(self, version: int, steps_done: int) -> None:
        """Keep what the model holds now, after `steps_done` optimizer steps, as `version`."""
        if version in self._versions:
            return  # sent once more, to an engine that came back
        if len(self._versions) == KEPT_VERSIONS:
            copy, _ = self._versions.pop(min(self._versions))
        else:
            copy = HostCopy(self._trained.tensors)
        copy.save()
        self._versions[version] = (copy, steps_done)

    def of_version(self, version: int, steps_done: int) -> HostCopy | None:
        """The newest kept weights that are not newer than `version`, else the oldest.

        None when those are what the model holds after `steps_done` steps.
        """
        known = [kept for kept in self._versions if kept <= version] or [min(self._versions)]
        copy, steps = self._versions[max(known)]
        return None if steps == steps_done else copy
