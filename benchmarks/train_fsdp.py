"""Tokens per second, MFU, peak memory and time per part of the FSDP trainer's step, without Ray.

`python benchmarks/train_fsdp.py --device cuda --shape qwen3-0.6b --tokens 16384 --rows 2` runs the trainer's own
classes on a random model: GRPO with AdamW on `rows` packed rows of `tokens` tokens each, layers recomputed in
backward. A row is one sequence unless `--sequences` cuts it. `--device cpu --shape tiny` checks the script. The
result goes to benchmarks/results/. Flags of `slime train` stand after `--`.

`--gpus 8` shards over as many GPUs of this machine, a process each; `--rows` counts per GPU, tokens per second and
loss are those of all together, memory is the first GPU's:

    python benchmarks/train_fsdp.py --device cuda --shape qwen3-4b --gpus 8 --tokens 16384 --rows 2 --no-operations

FLOPs of a step count what the model needs, not what is recomputed: per token 6 x (parameters of all matrix products,
the output head once, no embedding look-up), and per sequence and layer of causal attention 6 x heads x head_dim
x L (L + 1) (2 matrix products x 2 FLOPs x L (L + 1) / 2 forward, twice that backward). MFU = FLOPs / seconds / GPUs /
989e12.
"""

from __future__ import annotations

import argparse
import multiprocessing.connection
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.environment import describe, write_result
from benchmarks.shapes import SHAPES, classes_of, shape_of
from slime.arguments.entry import load_args
from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.modeling.attention import PackedSequences
from slime.training.flops import ModelFlops
from slime.training.logprobs import token_log_probs
from slime.training.rollout_data import RankData, partition_rollout_data
from slime.training.schedule import build_dp_schedule

PEAK_FLOPS = 989e12


def save_model(path: str, shape: dict, tokens: int, device: str) -> None:
    """A random Qwen3 checkpoint of that shape, made on `device`: billions of random numbers take long on a CPU."""
    from slime.quickstart.tokenizer import train_tokenizer

    train_tokenizer(["one two three"]).save_pretrained(path)
    torch.manual_seed(0)
    config_class, model_class = classes_of(shape)
    config = config_class(**shape, max_position_embeddings=max(tokens, 4096))
    with torch.device(device):
        model_class._from_config(config, dtype=torch.bfloat16).save_pretrained(path)


def model_process(path: str, shape: dict, tokens: int, device: str) -> None:
    """`save_model` in a process of its own, which leaves nothing on the GPU."""
    process = torch.multiprocessing.get_context("spawn").Process(target=save_model, args=(path, shape, tokens, device))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"making the model ended with exit code {process.exitcode}")


def step_flops(shape: dict, lengths: list[int]) -> float:
    """Forward and backward over sequences of these lengths; see the module's docstring."""
    model = ModelFlops.of_hf_config(shape)
    return 3.0 * sum(model.forward(length) for length in lengths)


class Clock:
    """Time between marks, by the name of the mark that opens it; on a GPU without waiting for it."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.marks: list[tuple[str, object]] = []

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((name, now))

    def pop(self) -> dict[str, float]:
        """Seconds per name since the last call."""
        if self.cuda:
            torch.cuda.synchronize()
        out: dict[str, float] = {}
        for (name, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            out[name] = out.get(name, 0.0) + (start.elapsed_time(end) / 1e3 if self.cuda else end - start)
        self.marks = []
        return out


class TimedTrainer(FSDPTrainRayActor):
    """The trainer with marks between its parts."""

    def node_address(self) -> str:
        return "127.0.0.1"

    def start(self, args) -> None:
        self.clock = Clock(args.device)
        self.init(args)
        step = self.optimizer.step

        def timed() -> dict[str, float]:
            self.clock.mark("optimizer")
            out = step()
            self.clock.mark("rest")
            return out

        self.optimizer.step = timed

    def _loss(self, *args):
        self.clock.mark("forward")
        out = super()._loss(*args)
        self.clock.mark("backward")
        return out


def trainer_args(options, model: str):
    flags = (
        f"--train-backend fsdp --hf-checkpoint {model} --device {options.device} "
        f"--rollout-batch-size {options.rows * options.gpus} "
        f"--n-samples-per-prompt {options.sequences} --num-rollout 100 --actor-num-gpus-per-node {options.gpus} "
        f"--colocate --micro-batch-size {options.sequences} --load-debug-rollout-data none_{{rollout_id}}.pt "
        f"--log-probs-chunk-size {options.chunk}"
    ).split()
    if options.gpus > 1:
        flags += ["--num-gpus-per-node", str(options.gpus)]
    if not options.no_recompute:
        flags.append("--gradient-checkpointing")
    return load_args([*flags, *options.flags])


def rollout_part(args, options, rank: int) -> dict:
    """Random samples: the response is all but one token, the advantages are not zero."""
    rng = np.random.default_rng(0)
    count, length = options.rows * options.gpus * options.sequences, options.tokens // options.sequences
    batch = {
        "tokens": [rng.integers(0, shape_of(options)["vocab_size"], length) for _ in range(count)],
        "total_lengths": [length] * count,
        "response_lengths": [length - 1] * count,
        "loss_masks": [np.ones(length - 1)] * count,
        "rewards": rng.normal(size=count).tolist(),
        "rollout_ids": list(range(count)),
        "sample_indices": list(range(count)),
    }
    schedule = build_dp_schedule(
        batch["total_lengths"],
        batch["rollout_ids"],
        dp_size=options.gpus,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
    )
    return partition_rollout_data(batch, schedule)[rank]


def measure(rank: int, options, model: str) -> dict | None:
    """Steps of one rank; the result on rank 0."""
    if options.device == "cuda" and options.gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    args = trainer_args(options, model)
    trainer = TimedTrainer(options.gpus, rank, "127.0.0.1", options.port)
    if rank == 0:
        trainer._store = torch.distributed.TCPStore("127.0.0.1", options.port, options.gpus, is_master=True)
    trainer.start(args)
    part = rollout_part(args, options, rank)
    cuda = options.device == "cuda"
    seconds, parts = [], []
    for step in range(options.warmup + options.steps):
        if cuda and step == options.warmup:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        metrics = trainer.train_on(step, RankData(part))
        trainer.clock.mark("end")
        times = trainer.clock.pop()
        if step >= options.warmup:
            seconds.append(time.perf_counter() - start)
            parts.append(times)
    if rank == 0 and options.profile:
        profile(trainer, part, options.profile)
    lengths = part["total_lengths"]
    result = None
    if rank == 0:
        best = int(np.argmin(seconds))
        flops = step_flops(shape_of(options), lengths) * options.gpus
        tokens = sum(lengths) * options.gpus
        result = {
            "tokens_per_s": tokens / seconds[best],
            "tokens_per_s_median": tokens / float(np.median(seconds)),
            "mfu": flops / seconds[best] / options.gpus / PEAK_FLOPS,
            "model_tflops_per_s_per_gpu": flops / seconds[best] / options.gpus / 1e12,
            "seconds_per_step": seconds,
            "parts_ms": {name: value * 1e3 for name, value in parts[best].items()},
            "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
            "loss": metrics["train/loss"],
            "grad_norm": metrics["train/grad_norm"],
        }
    trainer.dispose()
    return result


def profile(trainer: TimedTrainer, part: dict, path: str) -> None:
    """Kernel times of one step, to `path`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        trainer.train_on(1000, RankData(part))
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = recorded.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=90)
    Path(path).write_text(table)
    print(table)


def operations(options) -> dict:
    """Milliseconds of attention and of the log-prob operation alone, forward and backward, for one row."""
    shape, cuda = shape_of(options), options.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    make = {"device": options.device, "dtype": dtype}
    tokens = options.tokens
    heads, groups, dim = (shape[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    q, k, v = (torch.randn(tokens, n, dim, **make, requires_grad=True) for n in (heads, groups, groups))
    packed = PackedSequences([tokens // options.sequences] * options.sequences, options.device)
    out = {"attention": timed(lambda: packed.attend(0, q, k, v, dim**-0.5, None), options)}
    if cuda:
        out["attention_cudnn"] = timed(lambda: cudnn_attention(q, k, v, options.sequences), options)
    hidden = torch.randn(tokens, shape["hidden_size"], **make, requires_grad=True)
    weight = (torch.randn(shape["vocab_size"], shape["hidden_size"], **make) * 0.02).requires_grad_()
    targets = torch.randint(0, shape["vocab_size"], (tokens,), device=options.device)

    def log_probs():
        return token_log_probs(hidden, weight, targets, with_entropy=True, chunk_size=options.chunk)[0]

    out["log_probs"] = timed(log_probs, options)
    attention_flops = 2.0 * tokens * tokens / options.sequences * heads * dim
    for name in ("attention", "attention_cudnn"):
        if isinstance(out.get(name), dict):
            out[name]["forward_tflops"] = attention_flops / out[name]["forward_ms"] / 1e9
            out[name]["backward_tflops"] = 2.5 * attention_flops / out[name]["backward_ms"] / 1e9
    return out


def cudnn_attention(q, k, v, sequences: int) -> torch.Tensor:
    """The same attention by cuDNN: equal sequences as a batch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.view(sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def timed(function, options) -> dict[str, float] | str:
    clock, best = Clock(options.device), {"forward": float("inf"), "backward": float("inf")}
    try:
        for _ in range(4):
            clock.mark("forward")
            result = function()
            clock.mark("backward")
            result.backward(torch.ones_like(result))
            clock.mark("end")
            best = {name: min(best[name], value) for name, value in clock.pop().items()}
    except RuntimeError as error:
        return f"not available: {str(error).splitlines()[0]}"
    return {f"{name}_ms": value * 1e3 for name, value in best.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="tiny", choices=tuple(SHAPES))
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per row")
    parser.add_argument("--rows", type=int, default=2, help="rows (micro-batches) per step and GPU")
    parser.add_argument("--sequences", type=int, default=1, help="sequences that a row is packed from")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=-1, help="rows per chunk of the log-prob operation")
    parser.add_argument("--no-recompute", action="store_true", help="keep activations")
    parser.add_argument("--no-operations", action="store_true", help="leave out the single operations")
    parser.add_argument("--profile", help="write a table of kernel times to this file")
    parser.add_argument("--port", type=int, default=29591)
    parser.add_argument("--name", help="name of the result file")
    parser.add_argument("flags", nargs="*", help="after --: further flags of `slime train`")
    return parser.parse_args()


def measure_ranks(options, model: str) -> dict:
    """`measure` in a process per GPU. One that fails ends all."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_process, args=(rank, options, model, queue), daemon=True)
        for rank in range(options.gpus)
    ]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            ended = running.pop(sentinel)
            ended.join()  # the sentinel may come before the exit code
            code = ended.exitcode
            if code != 0:
                for process in running.values():
                    process.terminate()
                raise SystemExit(f"a rank ended with exit code {code}")
    return queue.get()


def _process(rank: int, options, model: str, queue) -> None:
    result = measure(rank, options, model)
    if rank == 0:
        queue.put(result)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as model:
        model_process(model, shape_of(options), options.tokens, options.device)
        result = measure(0, options, model) if options.gpus == 1 else measure_ranks(options, model)
    if not options.no_operations:
        result["operations"] = operations(options)
    environment = describe("torch", "transformers")
    if options.device == "cuda":
        environment["gpu"] = torch.cuda.get_device_name()
    setup = {key: value for key, value in vars(options).items() if key not in ("port", "name", "profile")}
    result = {"setup": setup, **result, "environment": environment}
    gpus = f"-{options.gpus}gpus" if options.gpus > 1 else ""
    name = options.name or f"train-fsdp-{options.device}-{options.shape}-{options.tokens}{gpus}"
    print(write_result(name, result).read_text())


if __name__ == "__main__":
    main()
