"""The embedded engine as an HTTP server that speaks SGLang's native API.

`python -m slime.engine.server --model-path DIR` serves on its own; slime starts one per engine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import torch
from aiohttp import web

from slime.engine.engine import Engine, EngineConfig
from slime.engine.handlers import EngineHandlers
from slime.modeling.hf import load_causal_lm
from slime.observability import stacks

logger = logging.getLogger(__name__)

# Weights by value arrive in request bodies.
MAX_BODY_BYTES = 64 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime.engine.server", description=__doc__)
    parser.add_argument("--model-path", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--port-file", help="the port is written here once the server listens")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: float32 on CPU, bfloat16 on CUDA")
    parser.add_argument("--max-running-requests", type=int, default=256)
    parser.add_argument("--max-total-tokens", type=int, help="tokens of KV cache; default: what memory allows")
    parser.add_argument("--context-length", type=int, help="default: the model's")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--chunked-prefill-size", type=int, help="most prompt tokens per step")
    parser.add_argument("--mem-fraction-static", type=float, default=0.85, help="GPU memory for weights and KV")
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument("--enable-weights-cpu-backup", action="store_true", help="released weights keep their content")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true", help="numbers that depend on no other request")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--parent-pid", type=int, help="exit when this process ends")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    args = parser.parse_args(argv)
    for name in ("max_running_requests", "page_size", "max_total_tokens", "context_length", "chunked_prefill_size"):
        value = vars(args)[name]
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 < args.mem_fraction_static < 1:
        parser.error(f"--mem-fraction-static must be in (0, 1), got {args.mem_fraction_static}")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args


def load_tokenizer(path: str, trust_remote_code: bool):
    """The checkpoint's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    if not any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def eos_token_ids(model: torch.nn.Module, tokenizer) -> set[int]:
    """All end tokens that the generation config, the model config and the tokenizer name."""
    found: set[int] = set()
    sources = [model.generation_config.eos_token_id, model.config.get_text_config().eos_token_id]
    for value in [*sources, tokenizer.eos_token_id if tokenizer is not None else None]:
        if value is not None:
            found.update(value if isinstance(value, (list, tuple)) else [value])
    return found


def build_engine(args: argparse.Namespace) -> Engine:
    """Load the model and allocate the engine."""
    model = load_causal_lm(args.model_path, DTYPES[args.dtype], args.device, args.trust_remote_code)
    tokenizer = load_tokenizer(args.model_path, args.trust_remote_code)
    config = EngineConfig(
        max_running_requests=args.max_running_requests,
        max_total_tokens=args.max_total_tokens,
        context_length=args.context_length,
        page_size=args.page_size,
        chunked_prefill_size=args.chunked_prefill_size,
        mem_fraction_static=args.mem_fraction_static,
        random_seed=args.random_seed,
        weights_cpu_backup=args.enable_weights_cpu_backup,
        disable_cuda_graph=args.disable_cuda_graph,
        batch_invariant=args.batch_invariant,
    )
    return Engine(model, tokenizer, eos_token_ids(model, tokenizer), config)


def write_port(path: str, port: int) -> None:
    """Readers see no file or a whole one."""
    temporary = f"{path}.{os.getpid()}.tmp"
    Path(temporary).write_text(f"{port}\n")
    os.replace(temporary, path)


def watch_parent(pid: int, ended: asyncio.Event) -> None:
    """Set `ended` when the process is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        ended.set()
        return
    asyncio.get_running_loop().add_reader(descriptor, ended.set)


async def serve(engine: Engine, args: argparse.Namespace) -> int:
    """Serve until a signal, the parent's end or a broken engine; returns the exit status."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    if args.parent_pid is not None:
        watch_parent(args.parent_pid, ended)
    engine.on_exit = lambda: loop.call_soon_threadsafe(ended.set)
    engine.start()
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    EngineHandlers(engine, args).register(app)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port, backlog=4096)
    await site.start()
    port = runner.addresses[0][1]
    logger.info("serving %s on %s:%s", args.model_path, args.host, port)
    if args.port_file:
        write_port(args.port_file, port)
    await ended.wait()
    await runner.cleanup()
    if engine.fatal is not None:
        logger.error("the engine stopped: %s", engine.fatal)
        return 1
    return 0


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stacks.dump_on_signal()
    # A short switch interval lets the engine's thread run while requests are parsed.
    sys.setswitchinterval(0.0005)
    engine = build_engine(args)
    status = asyncio.run(serve(engine, args))
    # The engine's thread may be inside a collective that never ends: leave without it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
