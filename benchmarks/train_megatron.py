"""Tokens per second, MFU and peak memory of the Megatron trainer's step, without Ray, beside `train_fsdp.py`.

`python benchmarks/train_megatron.py --device cuda --shape qwen3-0.6b --tokens 16384 --rows 2` runs the same model,
rows and algorithm as `train_fsdp.py` with the same options; FLOPs and MFU are counted as there. `--gpus 8 --
--tensor-model-parallel-size 2 --sequence-parallel` cuts it over as many processes; `--rows` is then per data-parallel
rank. Of a model with experts the ones that a token visits count; what does not fit is cut by `--layers`:

    python benchmarks/train_megatron.py --device cuda --shape qwen3-30b-a3b --layers 4 --tokens 8192 \\
        -- --no-moe-grouped-gemm

At the end the trainer is offloaded and comes back twice; with `--keep-groups` NCCL keeps its buffers meanwhile.
`--device cpu --shape tiny` checks the script. The result goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.environment import describe, write_result
from benchmarks.shapes import SHAPES, shape_of
from benchmarks.train_fsdp import PEAK_FLOPS, model_process, rollout_part, step_flops
from slime.arguments.entry import load_args
from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.training.rollout_data import RankData


class Trainer(MegatronTrainRayActor):
    def node_address(self) -> str:
        return "127.0.0.1"


def trainer_args(options: Namespace, model: str) -> Namespace:
    flags = (
        f"--train-backend megatron --hf-checkpoint {model} --device {options.device} --num-rollout 100 "
        f"--rollout-batch-size {options.rows * options.gpus} --n-samples-per-prompt {options.sequences} "
        f"--actor-num-gpus-per-node {options.gpus} --num-gpus-per-node {options.gpus} --colocate "
        f"--micro-batch-size {options.sequences} --load-debug-rollout-data none_{{rollout_id}}.pt "
        f"--log-probs-chunk-size {options.chunk}"
    ).split()
    if not options.no_recompute:
        flags.append("--gradient-checkpointing")
    args = load_args([*flags, *options.flags])
    # Without engines a run has no reason to offload.
    args.offload_train = not options.keep_groups
    return args


def measure(rank: int, options: Namespace, model: str) -> dict | None:
    """Steps of one rank; the result on rank 0."""
    cuda = options.device == "cuda"
    if cuda and options.gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    args = trainer_args(options, model)
    trainer = Trainer(options.gpus, rank, "127.0.0.1", options.port)
    if rank == 0:
        trainer._store = torch.distributed.TCPStore("127.0.0.1", options.port, options.gpus, is_master=True)
    trainer.init(args)
    data_ranks = torch.distributed.get_world_size(trainer.dp_group)
    # One step takes what one data-parallel rank has per row times the number of them.
    vars(args)["global_batch_size"] = options.rows * data_ranks * options.sequences
    sizes = Namespace(**{**vars(options), "gpus": data_ranks})
    part = rollout_part(args, sizes, torch.distributed.get_rank(trainer.dp_group))
    seconds = []
    for step in range(options.warmup + options.steps):
        if cuda and step == options.warmup:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        metrics = trainer.train_on(step, RankData(part))
        if cuda:
            torch.cuda.synchronize()
        if step >= options.warmup:
            seconds.append(time.perf_counter() - start)
    result = None
    if rank == 0:
        best, tokens = min(seconds), sum(part["total_lengths"]) * data_ranks
        flops = step_flops(shape_of(options), part["total_lengths"]) * data_ranks
        result = {
            "tokens_per_s": tokens / best,
            "tokens_per_s_median": tokens / float(np.median(seconds)),
            "mfu": flops / best / options.gpus / PEAK_FLOPS,
            "seconds_per_step": seconds,
            "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
            "loss": metrics["train/loss"],
            "grad_norm": metrics["train/grad_norm"],
        }
    if cuda:
        memory = sleep(trainer, part, options.warmup + options.steps)
        result = result and result | memory
    trainer.dispose()
    return result


def sleep(trainer: Trainer, part: dict, rollout_id: int) -> dict[str, list[float]]:
    """Two turns of the engines between two steps: seconds, and what is used of this rank's GPU, contexts included."""
    out: dict[str, list[float]] = {"offload_s": [], "onload_s": [], "step_after_s": []}
    out |= {"gpu_used_gb": [gpu_used()], "gpu_used_offloaded_gb": []}
    for turn in range(2):
        for name, action in (
            ("offload_s", trainer.offload),
            ("onload_s", trainer.onload),
            ("step_after_s", lambda: trainer.train_on(rollout_id + turn, RankData(part))),  # noqa: B023
        ):
            torch.distributed.barrier()
            start = time.perf_counter()
            action()
            torch.cuda.synchronize()
            out[name].append(time.perf_counter() - start)
            if name == "offload_s":
                out["gpu_used_offloaded_gb"].append(gpu_used())
    return out


def gpu_used() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def parse() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="tiny", choices=tuple(SHAPES))
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per row")
    parser.add_argument("--rows", type=int, default=2, help="rows (micro-batches) per step and data-parallel rank")
    parser.add_argument("--sequences", type=int, default=1, help="sequences that a row is packed from")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=-1, help="rows per chunk of the log-prob operation")
    parser.add_argument("--no-recompute", action="store_true", help="keep activations")
    parser.add_argument("--keep-groups", action="store_true", help="make process groups that are never left")
    parser.add_argument("--port", type=int, default=29592)
    parser.add_argument("--name", help="name of the result file")
    parser.add_argument("flags", nargs="*", help="after --: further flags of `slime train`")
    return parser.parse_args()


def _process(rank: int, options: Namespace, model: str, queue) -> None:
    queue.put(measure(rank, options, model))


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as model:
        model_process(model, shape_of(options), options.tokens, options.device)
        if options.gpus == 1:
            result = measure(0, options, model)
        else:
            context = torch.multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            processes = [
                context.Process(target=_process, args=(rank, options, model, queue)) for rank in range(options.gpus)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            result = next(r for r in (queue.get() for _ in processes) if r is not None)
    environment = describe("torch", "transformers", "megatron-core")
    if options.device == "cuda":
        environment["gpu"] = torch.cuda.get_device_name()
    setup = {key: value for key, value in vars(options).items() if key not in ("port", "name")}
    name = options.name or f"train-megatron-{options.device}-{options.shape}-{options.tokens}"
    print(write_result(name, {"setup": setup, **result, "environment": environment}).read_text())


if __name__ == "__main__":
    main()
