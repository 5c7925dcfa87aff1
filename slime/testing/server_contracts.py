"""Contracts of the hooks that run in the router and beside the transports of weights."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from aiohttp import web

from slime.testing.contracts import contract
from slime.testing.kit import Kit
from slime.utils.misc import load_hook

PROMPT = [5, 6, 7]


@contract("slime-router-middleware")
def slime_router_middleware(kit: Kit, path: str) -> None:
    """Requests of the rollout get through it to an engine, and the engine's answers back."""
    status, reply = asyncio.run(_ask_through(kit, path))
    assert status == 200, f"/generate is answered with status 200, not {status}: {reply}"
    scored = reply["meta_info"]["output_token_logprobs"]
    assert scored and all(len(item) >= 2 for item in scored), "the answer has the engine's tokens and log-probs"


async def _ask_through(kit: Kit, path: str) -> tuple[int, Any]:
    from slime.router.server import Router

    args = kit.args()
    router = Router(queue_timeout=5.0, middleware_paths=[path], args=args)
    runner = web.AppRunner(router.app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        router.pool.add(kit.engine_url)
        payload = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 4, "sampling_seed": 1},
            "return_logprob": True,
        }
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/generate"
            async with session.post(url, json=payload) as reply:
                return reply.status, await (reply.json() if reply.status == 200 else reply.text())
    finally:
        await runner.cleanup()


@contract("custom-update-weight-post-write")
def custom_update_weight_post_write(kit: Kit, path: str) -> None:
    """Is told of a complete directory of weights, which engines read after it returned."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    directory = kit.directory / "weight_v000001"
    directory.mkdir(exist_ok=True)
    weights = {"model.norm.weight": np.ones(4, dtype=np.float32)}
    save_file(weights, directory / "model.safetensors")
    hook = load_hook(path, "--custom-update-weight-post-write-path")
    hook(kit.args(custom_update_weight_post_write_path=path), str(directory), [kit.engine_url])
    left = load_file(directory / "model.safetensors")
    assert np.array_equal(left["model.norm.weight"], weights["model.norm.weight"]), "the weights are left as they were"
