"""Tokens per second of an engine: asked directly by a bare client, and by the rollout function through the router.

Both engines serve the same random Qwen3-0.6B-shaped model and the same requests, in turn, in one run.

    python benchmarks/rollout_throughput.py --engines embedded sglang -- --sglang-attention-backend triton ...
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.environment import describe, write_result  # noqa: E402

WORDS = "one two three four five six seven eight nine ten apples pears boxes trains red green blue".split()


async def no_reward(args, sample, **kwargs) -> float:
    return 0.0


def write_inputs(directory: Path, options: argparse.Namespace) -> tuple[Path, Path, list[list[int]]]:
    """A model with random weights (which hardly ever ends a response), prompts, and the prompts as tokens."""
    from slime.quickstart.model import SHAPES, save_model
    from slime.quickstart.tokenizer import train_tokenizer

    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=2 * options.prompt_tokens)) for _ in range(options.requests)]
    tokenizer = train_tokenizer(texts)
    model, prompts = directory / "model", directory / "prompts.jsonl"
    save_model(tokenizer, model, 0, SHAPES[options.model])
    texts = [tokenizer.decode(tokenizer(text)["input_ids"][: options.prompt_tokens]) for text in texts]
    prompts.write_text("".join(json.dumps({"input": text}) + "\n" for text in texts))
    return model, prompts, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def parse_slime_args(engine: str, model: Path, prompts: Path, directory: Path, options: argparse.Namespace):
    from slime.utils.arguments import parse_args

    flags = ["--rollout-engine", engine, "--device", options.device, "--train-backend", "fsdp", "--debug-rollout-only"]
    flags += ["--rollout-num-gpus", "1", "--num-gpus-per-node", "1", "--hf-checkpoint", str(model)]
    flags += ["--prompt-data", str(prompts), "--num-rollout", "1", "--run-dir", str(directory / f"run-{engine}")]
    flags += ["--rollout-batch-size", str(options.requests), "--n-samples-per-prompt", "1"]
    flags += ["--global-batch-size", str(options.requests), "--rollout-max-response-len", str(options.new_tokens)]
    flags += ["--custom-rm-path", "benchmarks.rollout_throughput:no_reward", "--seed", "0"]
    return parse_args([*flags, *(options.flags if engine == "sglang" else [])])


def server_command(engine: str, args) -> tuple[list[str], dict[str, str]]:
    from slime.backends.sglang_utils.command import launch_command, launch_env

    if engine == "sglang":
        return launch_command(args, 0, "127.0.0.1"), launch_env(args, ())
    command = [sys.executable, "-m", "slime.engine.server", "--model-path", args.hf_checkpoint, "--port", "0"]
    return [*command, "--device", args.device, "--dtype", args.dtype], {}


async def ask_directly(url: str, prompts: list[list[int]], new_tokens: int) -> float:
    """One request per prompt, all at once; tokens per second."""
    import aiohttp

    params = {"max_new_tokens": new_tokens, "temperature": 1.0}

    async def one(session, ids):
        payload = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        async with session.post(f"{url}/generate", json=payload) as reply:
            return (await reply.json())["meta_info"]["completion_tokens"]

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = time.perf_counter()
        counts = await asyncio.gather(*(one(session, ids) for ids in prompts))
        return sum(counts) / (time.perf_counter() - start)


def ask_through_rollout(args, data_source) -> float:
    """The default rollout function, through the router; tokens per second."""
    from slime.rollout.sglang_rollout import generate_rollout
    from slime.utils.misc import flatten

    start = time.perf_counter()
    output = generate_rollout(args, 0, data_source)
    return sum(sample.response_length for sample in flatten(output.samples)) / (time.perf_counter() - start)


def measure(engine: str, directory: Path, model: Path, prompts: Path, ids, options) -> dict:
    from slime.ray.server_process import ServerProcess, http_json
    from slime.rollout.data_source import RolloutDataSourceWithBuffer
    from slime.utils.http_utils import init_http_client

    args = parse_slime_args(engine, model, prompts, directory, options)
    command, env = server_command(engine, args)
    server = ServerProcess(engine, command, directory / f"{engine}.log", "127.0.0.1", env)
    router_command = [sys.executable, "-m", "slime.router.server", "--host", "127.0.0.1", "--port", "0"]
    router = ServerProcess("router", router_command, directory / f"router-{engine}.log", "127.0.0.1")
    try:
        url, router_url = server.wait_until_healthy(timeout=400.0), router.wait_until_healthy(timeout=60.0)
        http_json("POST", f"{router_url}/workers", {"url": url})
        args.sglang_router_ip, args.sglang_router_port = router.host, router.port
        init_http_client(args)
        data_source = RolloutDataSourceWithBuffer(args)
        asyncio.run(ask_directly(url, ids, 32))
        rates = {"direct": [], "rollout": []}
        for _ in range(options.repeat):
            http_json("POST", f"{url}/flush_cache", {})
            rates["direct"].append(asyncio.run(ask_directly(url, ids, options.new_tokens)))
            http_json("POST", f"{url}/flush_cache", {})
            rates["rollout"].append(ask_through_rollout(args, data_source))
    finally:
        server.close()
        router.close()
    medians = {f"{name}_tokens_per_s": statistics.median(values) for name, values in rates.items()}
    ratio = medians["rollout_tokens_per_s"] / medians["direct_tokens_per_s"]
    return {**medians, "rollout_over_direct": ratio, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["embedded"], choices=("embedded", "sglang"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="after --: further `--sglang-*` flags of `slime train`")
    options = parser.parse_args()
    result = {"setup": vars(options)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, prompts, ids = write_inputs(directory, options)
        for engine in options.engines:
            result[engine] = measure(engine, directory, model, prompts, ids, options)
            print(engine, {k: v for k, v in result[engine].items() if not isinstance(v, list)}, flush=True)
    result["environment"] = describe("torch", "transformers", "sglang")
    print(write_result(f"rollout-throughput-{options.device}", result))


if __name__ == "__main__":
    main()
