"""Rewards from a service (`--rm-type remote_rm --rm-url URL`)."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from slime.rollout.errors import RewardError
from slime.utils.http_utils import HttpError, backoff, request
from slime.utils.types import Sample

RETRIES = 10
TRY_AGAIN = (408, 425, 429)
"""4xx replies that ask for another try; any other is the caller's mistake and ends the run."""


async def remote_rm(args, sample: Sample, response: str | None = None) -> Any:
    """POST {prompt, response, label}; the JSON reply is the reward.

    Refused, reset and broken connections, 5xx and the replies of `TRY_AGAIN` are tried again with a growing pause, all
    within `--rm-timeout-secs`.

    Raises:
        RewardError: no usable reply in time; the message says what the last try met.
    """
    if not args.rm_url:
        raise RewardError.about(sample, "--rm-type remote_rm", "needs --rm-url")
    payload = {
        "prompt": sample.prompt,
        "response": sample.response if response is None else response,
        "label": sample.label,
    }
    name, limit = f"remote_rm {args.rm_url}", args.rm_timeout_secs
    failures: list[Exception] = []
    try:
        return await asyncio.wait_for(_ask(args.rm_url, payload, limit, failures), limit)
    except asyncio.TimeoutError as error:
        last = f" (last failure: {failures[-1]!s:.300})" if failures else ""
        raise RewardError.about(sample, name, f"did not answer within --rm-timeout-secs {limit:g}{last}") from error
    except (HttpError, aiohttp.ClientError, ValueError) as error:
        raise RewardError.about(sample, name, f"failed: {type(error).__name__}: {error!s:.500}") from error


async def _ask(url: str, payload: dict[str, Any], limit: float, failures: list[Exception]) -> Any:
    while True:
        try:
            return await request("POST", url, json_body=payload, max_retries=0, timeout=limit, quiet=True)
        except (HttpError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            failures.append(error)
            final = isinstance(error, HttpError) and error.status < 500 and error.status not in TRY_AGAIN
            if final or len(failures) > RETRIES:
                raise
        await asyncio.sleep(backoff(len(failures) - 1))
