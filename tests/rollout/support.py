"""Arguments, prompt files and a small real HTTP engine for rollout tests."""

import argparse
import asyncio
import contextlib
import json
import random

from aiohttp import web

DEFAULTS = {
    "hf_checkpoint": None,
    "trust_remote_code": False,
    "prompt_data": None,
    "input_key": "input",
    "label_key": "label",
    "tool_key": None,
    "metadata_key": "metadata",
    "multimodal_keys": None,
    "apply_chat_template": False,
    "apply_chat_template_kwargs": {},
    "rollout_global_dataset": True,
    "rollout_shuffle": False,
    "rollout_seed": 42,
    "rollout_max_prompt_len": None,
    "rollout_max_context_len": None,
    "rollout_max_response_len": 8,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_skip_special_tokens": False,
    "rollout_batch_size": 4,
    "over_sampling_batch_size": 4,
    "n_samples_per_prompt": 2,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "sglang_server_concurrency": 64,
    "sglang_router_ip": "127.0.0.1",
    "sglang_router_port": 0,
    "sglang_router_request_timeout_secs": 600,
    "partial_rollout": False,
    "max_weight_staleness": None,
    "update_weights_interval": 1,
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "mask_offpolicy_in_partial_rollout": False,
    "buffer_filter_path": None,
    "dynamic_sampling_filter_path": None,
    "custom_generate_function_path": None,
    "rollout_sample_hook_path": [],
    "rollout_sample_filter_path": None,
    "rollout_all_samples_process_path": None,
    "custom_rm_path": None,
    "eval_function_path": None,
    "rm_type": "math",
    "rm_url": None,
    "rm_timeout_secs": 20.0,
    "group_rm": False,
    "reward_key": None,
    "eval_datasets": [],
    "eval_max_context_len": None,
    "loss_mask_type": "qwen",
    "save": None,
    "load": None,
}


def make_args(**overrides) -> argparse.Namespace:
    unknown = set(overrides) - set(DEFAULTS)
    if unknown:
        raise KeyError(f"tests use unknown arguments {unknown}")
    return argparse.Namespace(**{**DEFAULTS, **overrides})


def write_prompts(path, count: int = 12) -> str:
    """Rows `what is the sum of i and 1 ?` -> i + 1."""
    with open(path, "w") as file:
        for i in range(count):
            row = {"input": f"what is the sum of {i} and 1 ?", "label": str(i + 1), "metadata": {"row": i}}
            file.write(json.dumps(row) + "\n")
    return str(path)


class ScriptedEngine:
    """A real HTTP server that speaks /generate and /abort_request of SGLang's native API.

    Emits one token per `token_seconds`; replies depend on seed and prompt alone.
    `hang_when(payload)` makes a request wait until it is aborted.
    """

    def __init__(self, token_seconds: float = 0.0, hang_when=None, version: str = "1") -> None:
        self.token_seconds = token_seconds
        self.hang_when = hang_when or (lambda payload: False)
        self.slow_when = lambda payload: False
        self.version = version
        self.requests: list[dict] = []
        self.aborts = 0
        self.disconnects = 0
        self.running: set[asyncio.Event] = set()
        self.url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        self.requests.append(payload)
        aborted = asyncio.Event()
        self.running.add(aborted)
        params = payload["sampling_params"]
        rng = random.Random(f"{params.get('sampling_seed')}:{payload['input_ids'][-1]}")
        tokens, reason = [], {"type": "length", "length": params["max_new_tokens"]}
        hang = self.hang_when(payload)
        try:
            for i in range(params["max_new_tokens"]):
                pause = None if hang and i >= 2 else self.token_seconds * (20 if self.slow_when(payload) else 1)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(aborted.wait(), pause)
                if aborted.is_set():
                    reason = {"type": "abort", "message": "Aborted"}
                    break
                tokens.append(30 + rng.randrange(60))
                if rng.random() < 0.2:
                    reason = {"type": "stop", "matched": tokens[-1]}
                    break
        except asyncio.CancelledError:
            self.disconnects += 1
            raise
        finally:
            self.running.discard(aborted)
        meta = {
            "finish_reason": reason,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}] if tokens else [],
            "prompt_tokens": len(payload["input_ids"]),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5 - t / 100, t, None] for t in tokens],
        }
        text = " ".join(f"t{t}" for t in tokens)
        return web.json_response({"text": text, "output_ids": tokens, "meta_info": meta})

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts += 1
        for event in self.running:
            event.set()
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/model_info", self.model_info)
        return app


@contextlib.asynccontextmanager
async def served(app: web.Application):
    """Serve an app on a free port; yields its URL."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
