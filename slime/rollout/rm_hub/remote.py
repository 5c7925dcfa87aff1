"""Rewards from a service (`--rm-type remote_rm --rm-url URL`)."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from slime.rollout.errors import RewardError
from slime.utils.http_utils import HttpError, request
from slime.utils.types import Sample

RETRIES = 10


async def remote_rm(args, sample: Sample, response: str | None = None) -> Any:
    """POST {prompt, response, label}; the JSON reply is the reward. Retries with back-off within `--rm-timeout-secs`.

    Raises:
        RewardError: no usable reply in time.
    """
    payload = {
        "prompt": sample.prompt,
        "response": sample.response if response is None else response,
        "label": sample.label,
    }
    name = f"remote_rm {args.rm_url}"
    if not args.rm_url:
        raise RewardError.about(sample, "--rm-type remote_rm", "needs --rm-url")
    limit = args.rm_timeout_secs
    call = request("POST", args.rm_url, json_body=payload, max_retries=RETRIES, timeout=limit, quiet=True)
    try:
        return await asyncio.wait_for(call, limit)
    except asyncio.TimeoutError as error:
        raise RewardError.about(sample, name, f"did not answer within --rm-timeout-secs {limit:g}") from error
    except (HttpError, aiohttp.ClientError, ValueError) as error:
        raise RewardError.about(sample, name, f"failed: {error}") from error
