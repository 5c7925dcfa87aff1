"""One logging set-up for every process."""

from __future__ import annotations

import logging
import os
import sys


def configure_logging(level: str | int | None = None, prefix: str = "") -> None:
    """Log to stderr as `time level [prefix] module: message`; a second call changes level and prefix only.

    Args:
        level: a logging level; None takes the environment variable SLIME_LOG_LEVEL, else INFO.
        prefix: who logs, for example "rollout" or "actor 3".
    """
    level = level or os.environ.get("SLIME_LOG_LEVEL", "INFO")
    tag = f"[{prefix}] " if prefix else ""
    formatter = logging.Formatter(f"%(asctime)s %(levelname).1s {tag}%(name)s: %(message)s", "%H:%M:%S")
    root = logging.getLogger()
    ours = [h for h in root.handlers if getattr(h, "slime", False)]
    if not ours:
        handler = logging.StreamHandler(sys.stderr)
        handler.slime = True
        root.addHandler(handler)
        ours = [handler]
    for handler in ours:
        handler.setFormatter(formatter)
    root.setLevel(level.upper() if isinstance(level, str) else level)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
