"""What a router adds to a request: slime's, sglang-router and a direct call in one run.

    python -m benchmarks.router [--sglang-router-env DIR]

Workers are small servers that answer /generate after a fixed time with a reply of the usual size, so that the router
is what is measured. Rounds of the systems alternate. Added latency is the difference of the percentiles to the direct
calls of the same run; requests/s at `--concurrency` says what the whole machine carries, clients and workers included.
The router's own CPU time per request says what it takes, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil
from aiohttp import web

from benchmarks.environment import describe, write_result
from slime.router.sglang import find_python
from slime.utils.misc import atomic_write

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 256
PAYLOAD = json.dumps(
    {
        "input_ids": list(range(PROMPT_TOKENS)),
        "sampling_params": {"max_new_tokens": RESPONSE_TOKENS, "temperature": 1.0},
        "return_logprob": True,
    }
).encode()
HEADERS = {"Content-Type": "application/json"}
START_SECS = 60.0


async def worker(port_file: str, seconds: float) -> None:
    """A server that answers like an engine, after `seconds`."""
    scored = [[-0.25, token, None] for token in range(RESPONSE_TOKENS)]
    meta = {"finish_reason": {"type": "length"}, "weight_version": "1", "output_token_logprobs": scored}
    body = json.dumps({"text": "word " * RESPONSE_TOKENS, "output_ids": scored, "meta_info": meta}).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(seconds)
        return web.Response(body=body, content_type="application/json")

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "model", "status": "ready"})

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/{path:.*}", info)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    atomic_write(port_file, str(runner.addresses[0][1]).encode())
    await asyncio.Event().wait()


class Servers:
    """Child processes that write their port to a file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen] = []

    def start(self, *command: str) -> str:
        port_file = self.directory / f"port-{len(self.processes)}"
        process = subprocess.Popen([sys.executable, "-m", *command, "--port-file", str(port_file)])
        self.processes.append(process)
        deadline = time.monotonic() + START_SECS
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} did not start")
            time.sleep(0.05)
        return f"http://127.0.0.1:{port_file.read_text()}"

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()


async def register(session: aiohttp.ClientSession, router: str, workers: list[str]) -> None:
    """Make the workers known and wait until the router uses them."""
    deadline = time.monotonic() + START_SECS
    for url in workers:
        while True:
            try:
                async with session.post(f"{router}/workers", json={"url": url}) as reply:
                    if reply.status < 400:
                        break
            except aiohttp.ClientConnectionError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)
    while True:
        async with session.get(f"{router}/workers") as reply:
            ready = [worker for worker in (await reply.json())["workers"] if worker["is_healthy"]]
        if len(ready) == len(workers):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{router} uses {len(ready)} of {len(workers)} workers")
        await asyncio.sleep(0.2)


async def one_round(
    session: aiohttp.ClientSession, urls: list[str], pid: int | None, requests: int, concurrency: int
) -> dict:
    """Latencies (s) of `requests` requests, `concurrency` at a time, over `urls` in turn; requests/s; CPU of `pid`."""
    latencies: list[float] = []
    left = iter(range(requests))

    async def client() -> None:
        for index in left:
            start = time.perf_counter()
            async with session.post(f"{urls[index % len(urls)]}/generate", data=PAYLOAD, headers=HEADERS) as reply:
                body = await reply.read()
                if reply.status != 200 or len(body) < 1000:
                    raise RuntimeError(f"status {reply.status}: {body[:200]!r}")
            latencies.append(time.perf_counter() - start)

    start, cpu_start = time.perf_counter(), cpu_seconds(pid)
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return {
        "latencies": latencies,
        "requests_per_s": requests / (time.perf_counter() - start),
        "cpu_ms": 1e3 * (cpu_seconds(pid) - cpu_start) / requests,
    }


def cpu_seconds(pid: int | None) -> float:
    """Of a process and its children; 0 without one."""
    if pid is None:
        return 0.0
    process = psutil.Process(pid)
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


async def measure(
    systems: dict[str, list[str]], pids: dict[str, int | None], args: argparse.Namespace
) -> dict[str, dict]:
    rounds: dict[tuple[str, int], list[dict]] = {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(args.rounds + 1):
            for concurrency, requests in ((1, args.single_requests), (args.concurrency, args.requests)):
                for name, urls in systems.items():
                    result = await one_round(session, urls, pids[name], requests, concurrency)
                    rounds.setdefault((name, concurrency), []).append(result)
    out: dict[str, dict] = {}
    for (name, concurrency), results in rounds.items():
        latencies = sorted(1e3 * value for result in results[1:] for value in result["latencies"])  # first: warm-up
        out.setdefault(name, {})[f"concurrency {concurrency}"] = {
            "latency_ms_p50": statistics.median(latencies),
            "latency_ms_p99": latencies[int(0.99 * len(latencies))],
            "requests_per_s": statistics.median(result["requests_per_s"] for result in results[1:]),
            "router_cpu_ms_per_request": statistics.median(result["cpu_ms"] for result in results[1:]),
        }
    for name, by_concurrency in out.items():
        for key, row in by_concurrency.items():
            direct = out["direct"][key]
            row |= {f"added_ms_{p}": row[f"latency_ms_{p}"] - direct[f"latency_ms_{p}"] for p in ("p50", "p99")}
            print(f"{name:14} {key:16}", {k: round(v, 2) for k, v in row.items()}, flush=True)
    return out


async def run(args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        servers = Servers(Path(directory))
        try:
            command = ("benchmarks.router", "--worker-seconds", str(args.worker_seconds))
            workers = [servers.start(*command) for _ in range(args.workers)]
            systems = {"direct": workers, "slime": [servers.start("slime.router.server", "--log-level", "WARNING")]}
            pids: dict[str, int | None] = {"direct": None, "slime": servers.processes[-1].pid}
            python = find_python(args.sglang_router_env)
            if python is not None:
                flags = "--policy round_robin --log-level error"
                systems["sglang-router"] = [
                    servers.start("slime.router.sglang", "--python", python, f"--flags={flags}")
                ]
                pids["sglang-router"] = servers.processes[-1].pid
            async with aiohttp.ClientSession() as session:
                for name in systems.keys() - {"direct"}:
                    await register(session, systems[name][0], workers)
            return await measure(systems, pids, args)
        finally:
            servers.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4096, help="per round")
    parser.add_argument("--single-requests", type=int, default=100, help="per round, one at a time")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds; one more warms up")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker-seconds", type=float, default=0.05, help="how long a worker takes")
    parser.add_argument("--sglang-router-env", help="virtual environment with sglang-router")
    parser.add_argument("--port-file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.port_file:
        # sglang-router asks first whether it is a gRPC server.
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
        asyncio.run(worker(args.port_file, args.worker_seconds))
        return
    settings = {k: v for k, v in vars(args).items() if k not in ("port_file", "sglang_router_env")}
    settings |= {"prompt_tokens": PROMPT_TOKENS, "response_tokens": RESPONSE_TOKENS}
    results = asyncio.run(run(args))
    versions = describe("aiohttp") | {"sglang_router": _version(find_python(args.sglang_router_env))}
    print(write_result("router", {"settings": settings, "results": results, "environment": versions}))


def _version(python: str | None) -> str | None:
    if python is None:
        return None
    code = "import importlib.metadata as m; print(m.version('sglang-router'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
