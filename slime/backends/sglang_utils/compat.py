"""The differences between SGLang releases, in one place.

What can be seen in the installed package is looked at there, so that a release that slime does not know works as long
as its API did not change. Versions decide only what is tested and which packages fit together.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

OLDEST_TESTED = "0.5.17"
NEWEST_TESTED = "0.5.23"

TORCH_OF_RELEASES = (("0.5.11", "0.5.17", "2.11.0"), ("0.5.18", "0.5.20", "2.13.0"), ("0.5.22", "0.5.23", "2.14.1"))
"""(first release, last release, the torch that their wheels pin)."""


def parse_version(text: str) -> tuple[int, ...]:
    """`0.5.17.post1` -> (0, 5, 17)."""
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[^\d.]", text)[0])[:3])


def installed_version() -> str | None:
    """The version of the installed SGLang; importing it would take seconds."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def version_warning(version: str) -> str | None:
    """What to tell the user about a release that slime was not tested with."""
    if parse_version(version) > parse_version(NEWEST_TESTED):
        return (
            f"SGLang {version} is newer than {NEWEST_TESTED}, the newest release that slime was tested with; "
            "it works as long as its HTTP API did not change"
        )
    if parse_version(version) < parse_version(OLDEST_TESTED):
        return f"SGLang {version} is older than {OLDEST_TESTED}, the oldest release that slime was tested with"
    return None


def pinned_torch(version: str) -> str | None:
    """The torch that a release was built for, if slime knows it."""
    for first, last, torch in TORCH_OF_RELEASES:
        if parse_version(first) <= parse_version(version) <= parse_version(last):
            return torch
    return None


@functools.cache
def package_dir() -> Path | None:
    """Where the installed SGLang lies, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _source(*parts: str) -> str:
    """Text of a file of the installed SGLang; empty where the release has no such file."""
    path = Path(package_dir() or "", *parts)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@dataclass(frozen=True)
class Release:
    """What one release of SGLang does and does not do."""

    version: str
    routes: frozenset[str]
    """Paths that its HTTP server has."""
    flushes_while_held: bool
    """Retracted requests survive a cache flush; without that they are prefilled from the old weights' KV, and a
    flush kills the scheduler."""

    @property
    def has_update_session(self) -> bool:
        """Weight updates stand between /begin_weight_update and /end_weight_update."""
        return "/begin_weight_update" in self.routes

    @classmethod
    def of_installed(cls) -> Release:
        """Look at the installed package (its source, since importing its scheduler takes long)."""
        server = _source("srt", "entrypoints", "http_server.py")
        routes = frozenset(re.findall(r"@app\.\w+\(\s*\"(/[\w/]*)\"", server))
        held = "is_fully_idle(ignore_waiting=self._engine_paused)" in _source("srt", "managers", "scheduler.py")
        return cls(installed_version() or "unknown", routes, flushes_while_held=held)


def deterministic_attention_backends() -> tuple[str, ...]:
    """What --enable-deterministic-inference lets --attention-backend be; empty where the release does not say."""
    sources = (_source("srt", "arg_groups", "choices.py"), _source("srt", "server_args.py"))
    listed = (re.search(r"^DETERMINISTIC_ATTENTION_BACKEND_CHOICES = \[(.*?)\]", s, re.M | re.S) for s in sources)
    return next((tuple(re.findall(r"\"(\w+)\"", found[1])) for found in listed if found), ())


def sampling_fields() -> frozenset[str]:
    """What `sampling_params` may hold: releases up to 0.5.20 answer other fields with an internal error.

    Imports SGLang: for its own process only.
    """
    from sglang.srt.sampling.sampling_params import SamplingParams

    return frozenset(inspect.signature(SamplingParams).parameters)
