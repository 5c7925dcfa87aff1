"""Seconds from a trainer's parameters to the engines that serve them, for models too large to train on the machine.

Only what an update needs exists: Megatron's shards with random weights (no gradients, no optimizer) and stock SGLang
with `--load-format dummy` (or the embedded engine), so that no checkpoint is written. Gather over the trainer's ranks,
conversion, transport and loading are those of a run, and `WeightUpdater.check` proves that every weight arrives.

    python benchmarks/weight_sync.py --shape qwen3-30b-a3b --gpus 4 --engine-gpus 4 --device cuda -- \
        --expert-model-parallel-size 4 --sglang-attention-backend triton

`--device cpu --shape tiny-moe --engine embedded` checks the script. The result goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.environment import describe, write_result
from benchmarks.shapes import SHAPES, classes_of, shape_of


def write_model(path: Path, shape: dict, with_weights: bool) -> None:
    """Config and tokenizer; weights for an engine that cannot make them up."""
    from safetensors.torch import save_file

    from slime.quickstart.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["one two three"])
    tokenizer.save_pretrained(path)
    (path / "prompts.jsonl").write_text('{"input": "one"}\n')
    config_class, model_class = classes_of(shape)
    config = config_class(**shape, max_position_embeddings=4096)
    config.architectures = [model_class.__name__]
    config.save_pretrained(path)
    if with_weights:
        model_class(config).to(torch.float32).save_pretrained(path)
    else:
        save_file({}, path / "model.safetensors")  # nothing reads it


def slime_args(options: Namespace, model: str, run_dir: str) -> Namespace:
    from slime.utils.arguments import parse_args

    trainers, engines = options.gpus, options.engines * options.engine_gpus
    gpus = max(trainers, engines) if options.colocate else trainers + engines
    flags = ["--train-backend", "megatron", "--rollout-engine", options.engine, "--device", options.device]
    flags += ["--hf-checkpoint", model, "--run-dir", run_dir, "--actor-num-gpus-per-node", str(trainers)]
    flags += ["--num-gpus-per-node", str(gpus), "--rollout-num-gpus-per-engine", str(options.engine_gpus)]
    flags += ["--colocate"] if options.colocate else ["--rollout-num-gpus", str(engines)]
    flags += ["--num-rollout", "1", "--rollout-batch-size", "8", "--prompt-data", f"{model}/prompts.jsonl"]
    flags += ["--rm-type", "math"]
    if options.engine == "sglang":
        flags += ["--sglang-load-format", "dummy"]
    return parse_args([*flags, *options.flags])


def start_engines(options: Namespace, args: Namespace, directory: Path) -> list:
    """The servers, each on its GPUs: the trainers' own with `--colocate`, else those behind them."""
    from slime.backends.sglang_utils.command import launch_command, launch_env
    from slime.ray.server_process import ServerProcess

    servers = []
    for index in range(options.engines):
        first = index * options.engine_gpus + (0 if options.colocate else options.gpus)
        gpus = [str(first + i) for i in range(options.engine_gpus)] if options.device == "cuda" else []
        if options.engine == "sglang":
            command, env = launch_command(args, index, "127.0.0.1"), launch_env(args, gpus)
        else:
            command = [sys.executable, "-m", "slime.engine.server", "--model-path", args.hf_checkpoint, "--port", "0"]
            command, env = [*command, "--device", args.device, "--dtype", args.dtype], {}
            if gpus:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        servers.append(ServerProcess(f"engine-{index}", command, directory / f"engine-{index}.log", "127.0.0.1", env))
    return servers


def trainer(rank: int, options: Namespace, args: Namespace, urls: list[str], queue) -> None:
    """One trainer rank: shards of the model, then the updates; rank 0 reports."""
    if options.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    from slime.backends.megatron_utils import compat
    from slime.backends.megatron_utils.architecture import read_architecture
    from slime.backends.megatron_utils.model_config import transformer_config
    from slime.backends.megatron_utils.model_provider import build_chunks
    from slime.backends.megatron_utils.parallel import init_parallel
    from slime.backends.megatron_utils.settings import config_overrides, parallel_sizes
    from slime.backends.megatron_utils.weights import MegatronWeights
    from slime.weight_sync.connect import EngineConnections

    device = torch.device(options.device)
    compat.install()
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=rank,
        world_size=options.gpus,
    )
    sizes, dtype = parallel_sizes(args), getattr(torch, args.dtype)
    init_parallel(sizes, 0, 10)
    architecture = read_architecture(args.hf_checkpoint)
    config = transformer_config(architecture, sizes, dtype, device, **config_overrides(args))
    chunks = [chunk.to(device) for chunk in build_chunks(architecture, config, args.make_vocab_size_divisible_by)]
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.normal_(std=0.02)
    start = time.perf_counter()
    source = MegatronWeights(chunks, architecture, dtype, device)
    per_engine = options.engine_gpus
    first = 0 if options.colocate else options.gpus
    slots = [[first + i * per_engine + j for j in range(per_engine)] for i in range(options.engines)]
    updater = EngineConnections(args, source, rank, device, "actor", "127.0.0.1").connect(urls, slots, 0)
    connected = time.perf_counter() - start
    phases = []
    for _ in range(options.repeat + 1):
        torch.distributed.barrier()
        start = time.perf_counter()
        metrics = updater.update()
        phases.append({"seconds": time.perf_counter() - start, **metrics})
    if options.check:
        updater.check()
    if rank == 0:
        queue.put({"connect_s": connected, "first": phases[0], "updates": phases[1:], "checked": options.check})
    updater.close()
    torch.distributed.destroy_process_group()


def measure(options: Namespace, directory: Path) -> dict:
    model = directory / "model"
    write_model(model, shape_of(options), with_weights=options.engine == "embedded")
    args = slime_args(options, str(model), str(directory / "run"))
    servers = start_engines(options, args, directory)
    try:
        start = time.perf_counter()
        urls = [server.wait_until_healthy(timeout=options.patience) for server in servers]
        started = time.perf_counter() - start
        context = torch.multiprocessing.get_context("spawn")
        queue = context.Queue()
        ranks = [context.Process(target=trainer, args=(i, options, args, urls, queue)) for i in range(options.gpus)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()  # not its sentinel, which torch's manager of shared memory keeps open
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"the trainers ended with {[rank.exitcode for rank in ranks]}")
        result = queue.get(timeout=60)
    finally:
        for server in servers:
            server.close()
    median = {
        key: statistics.median(update[key] for update in result["updates"])
        for key in result["updates"][0]
        if key != "train/weight_version"
    }
    gbps = median["perf/update_weights_bytes"] / median["seconds"] / 1e9
    return {"median": median, "gb_per_s": gbps, "engines_start_s": started, **result}


def parse() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="tiny-moe", choices=tuple(SHAPES))
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--engine", default="sglang", choices=("sglang", "embedded"))
    parser.add_argument("--gpus", type=int, default=1, help="trainer ranks")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--engine-gpus", type=int, default=1, help="GPUs per engine")
    parser.add_argument("--disaggregate", dest="colocate", action="store_false", help="engines on GPUs of their own")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-check", dest="check", action="store_false", help="without the proof at the end")
    parser.add_argument("--patience", type=float, default=400.0, help="seconds that an engine may take to start")
    parser.add_argument("--port", type=int, default=29593)
    parser.add_argument("--name", help="name of the result file")
    parser.add_argument("flags", nargs="*", help="after --: further flags of `slime train`")
    return parser.parse_args()


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as directory:
        result = measure(options, Path(directory))
    environment = describe("torch", "transformers", "megatron-core", "sglang")
    if options.device == "cuda":
        environment["gpu"] = torch.cuda.get_device_name()
    setup = {key: value for key, value in vars(options).items() if key not in ("port", "name")}
    name = options.name or f"weight-sync-{options.shape}-{options.device}-{options.gpus}"
    print(write_result(name, {"setup": setup, **result, "environment": environment}).read_text())


if __name__ == "__main__":
    main()
