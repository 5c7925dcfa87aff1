"""A rollout function that never returns: the engines stay up to be used by hand (`curl` to the router)."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger(__name__)

REPORT_SECONDS = 60.0


def sleep(args, rollout_id: int, data_source, evaluation: bool = False):
    """`--rollout-function-path slime.rollout.sleep_rollout.sleep`. Ends with the process."""
    forever = threading.Event()
    minutes = 0
    while not forever.wait(REPORT_SECONDS):
        minutes += 1
        logger.info(
            "rollout %s asleep for %d min; the router is http://%s:%s",
            rollout_id, minutes, args.sglang_router_ip, args.sglang_router_port,
        )  # fmt: skip
