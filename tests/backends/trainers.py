"""Trainer ranks for tests: arguments, rollout parts, and worlds of real processes over gloo."""

from __future__ import annotations

import faulthandler
import io
import traceback
from argparse import Namespace

import numpy as np
import torch
import torch.distributed as dist

from slime.arguments.entry import load_args
from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.training.rollout_data import RankData, partition_rollout_data
from slime.training.schedule import build_dp_schedule
from tests.processes import CONTEXT


def trainer_args(model_dir: str, *flags: str, **changes) -> Namespace:
    """Validated arguments of a small run; `changes` are set afterwards."""
    argv = (
        f"--train-backend fsdp --hf-checkpoint {model_dir} --ref-load {model_dir} --device cpu --rollout-batch-size 4 "
        "--n-samples-per-prompt 2 --num-rollout 4 --rollout-max-response-len 32 --actor-num-gpus-per-node 1 "
        "--colocate --lr 1e-3 --adam-eps 1e-2 --debug-train-only --load-debug-rollout-data none_{rollout_id}.pt"
    )
    args = load_args([*argv.split(), *flags])
    vars(args).update(changes)
    return args


def rollout_batch(seed: int, samples: int = 8, vocab: int = 128) -> dict:
    """Ragged samples with random masks and rewards."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(2, 9, samples), rng.integers(1, 20, samples)
    masks = [rng.integers(0, 2, n).tolist() for n in responses]
    masks[0] = [0] * len(masks[0])
    return {
        "tokens": [rng.integers(0, vocab, p + r).tolist() for p, r in zip(prompts, responses, strict=True)],
        "total_lengths": (prompts + responses).tolist(),
        "response_lengths": responses.tolist(),
        "loss_masks": masks,
        "rollout_log_probs": [(-rng.random(n) * 3).tolist() for n in responses],
        "rewards": (rng.integers(-32, 32, samples) / 16).tolist(),  # exact in float32
        "rollout_ids": list(range(samples)),
        "sample_indices": [100 + i for i in range(samples)],
    }


def long_rollout_batch(lengths):
    """`rollout_batch` with sequences of these lengths, all but 9 tokens of each a response."""
    batch = rollout_batch(0)
    for i, length in enumerate(lengths):
        tokens = torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        sample = {"tokens": tokens, "total_lengths": length, "response_lengths": length - 9}
        sample |= {"loss_masks": [1] * (length - 9), "rollout_log_probs": [-5.0] * (length - 9)}
        for key, value in sample.items():
            batch[key][i] = value
    return batch


def kept_tokens(batch: dict, vocab: int = 128) -> dict[str, list]:
    """What top-p left to choose from: up to 9 random tokens each."""
    rng = np.random.default_rng(0)
    counts = [rng.integers(0, 10, n) for n in batch["response_lengths"]]
    return {
        "rollout_top_p_token_ids": [rng.integers(0, vocab, n.sum()) for n in counts],
        "rollout_top_p_token_offsets": [np.concatenate([[0], n.cumsum()]) for n in counts],
    }


def rollout_parts(args: Namespace, batch: dict, dp_size: int) -> list[dict]:
    if args.use_rollout_top_p_replay:
        batch = batch | kept_tokens(batch)
    schedule = build_dp_schedule(
        batch["total_lengths"],
        batch["rollout_ids"],
        dp_size=dp_size,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        max_tokens=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
        micro_batch_multiple=args.pipeline_model_parallel_size if args.virtual_pipeline_model_parallel_size else 1,
    )
    return partition_rollout_data(batch, schedule)


def train_rollout(trainer: FSDPTrainRayActor, rollout_id: int, seed: int | None = None) -> dict[str, float]:
    """Train on a random rollout, the same one for every world size."""
    batch = rollout_batch(rollout_id if seed is None else seed)
    dp_size = trainer.world_size // trainer.cp.size
    part = rollout_parts(trainer.args, batch, dp_size)[trainer.dp_rank]
    return trainer.train_on(rollout_id, RankData(part))


class ExactTrainer(FSDPTrainRayActor):
    """Everything in float64, so that sums in another order still agree to 1e-10."""

    def _load(self, path):
        from slime.backends.fsdp_utils.model import ModelOptions, build_policy

        self.dtype = torch.float64
        options = ModelOptions(
            path,
            torch.float64,
            torch.float64,
            self.args.gradient_checkpointing,
            compile_backend=self.args.fsdp_compile,
        )
        return build_policy(options, self.mesh, self.device, self.cp)


def parameters_of(trainer: FSDPTrainRayActor) -> dict[str, torch.Tensor]:
    """Full parameters; collective."""
    specs = trainer.weights.tensor_specs()
    out = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    trainer.weights.gather(specs, out)
    return {spec.name: tensor for spec, tensor in zip(specs, out, strict=True)}


def make_trainer(kind: type[FSDPTrainRayActor], args: Namespace, rank: int, world_size: int, port: int, **init):
    """A trainer rank outside Ray, in the world that `run_world` made. A process may make several in turn."""
    trainer = kind(world_size, rank)
    if dist.is_initialized():
        trainer.join_world = lambda *_: None
    trainer._store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, wait_for_workers=False)
    trainer.start_rollout_id = trainer.init(args, **init)
    return trainer


def start_world(function, world_size: int, *args):
    """Processes of `function(rank, world_size, port, *args)`, the queue of their results, and the store to keep."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=_rank_main, args=(queue, function, rank, world_size, store.port, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes, queue, store


RESULT_SECS = 180
"""Below the limit of a test; ranks that take longer say where they are before they are given up."""


def run_world(function, world_size: int, *args) -> list:
    """`function(rank, world_size, port, *args)` in a process per rank; their results by rank."""
    processes, queue, _store = start_world(function, world_size, *args)
    results: dict[int, object] = {}
    try:
        for _ in processes:
            rank, error, result = queue.get(timeout=RESULT_SECS)
            if error is not None:
                raise AssertionError(f"rank {rank} failed:\n{error}")
            results[rank] = torch.load(io.BytesIO(result), weights_only=False)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [results[rank] for rank in range(world_size)]


def _rank_main(queue, function, rank, world_size, port, args):
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    faulthandler.dump_traceback_later(RESULT_SECS - 10)
    try:
        # As bytes: what fails to reach shared memory while a process ends is lost without a word.
        result = io.BytesIO()
        torch.save(function(rank, world_size, port, *args), result)
        queue.put((rank, None, result.getvalue()))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
