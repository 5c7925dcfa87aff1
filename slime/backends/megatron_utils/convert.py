"""Between Megatron's torch_dist checkpoints and Hugging Face directories, in one process or several.

Under `torchrun --nproc-per-node N` each of the N processes holds 1 / N of the layers.
"""

from __future__ import annotations

import argparse
import os
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import compat
from slime.backends.megatron_utils.architecture import read_architecture


@contextmanager
def _world():
    """Processes of torchrun, or this one alone, on CPU; with pipeline-parallel groups over all of them."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size > 1:
        dist.init_process_group("gloo")
    else:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    from slime.backends.megatron_utils.parallel import ParallelSizes, destroy_parallel, init_parallel

    sizes = ParallelSizes(pipeline=size)
    init_parallel(sizes, seed=0, timeout_minutes=30)
    try:
        yield sizes
    finally:
        destroy_parallel()
        dist.destroy_process_group()


def _model(architecture, sizes, dtype: torch.dtype):
    from slime.backends.megatron_utils.model_config import transformer_config
    from slime.backends.megatron_utils.model_provider import build_model

    cpu = torch.device("cpu")
    return build_model(architecture, transformer_config(architecture, sizes, dtype, cpu))


def hf_to_torch_dist(hf_checkpoint: str, save: str, dtype: torch.dtype) -> None:
    """Write the weights as a checkpoint of rollout 0 under `save`, for --load with --finetune."""
    compat.install()
    from slime.backends.fsdp_utils.checkpoint import Progress
    from slime.backends.megatron_utils.checkpoint import save_checkpoint
    from slime.backends.megatron_utils.weights import load_hf

    architecture = read_architecture(hf_checkpoint)
    with _world() as sizes:
        model = _model(architecture, sizes, dtype)
        load_hf([model], architecture, hf_checkpoint)
        save_checkpoint(save, 0, [model], None, Progress())


def torch_dist_to_hf(input_dir: str, output_dir: str, origin_hf_dir: str, dtype: torch.dtype) -> None:
    """Write the weights of one iteration's directory with config, tokenizer and names of `origin_hf_dir`."""
    compat.install()
    from slime.backends.megatron_utils.checkpoint import load_weights
    from slime.backends.megatron_utils.hf_export import export_hf
    from slime.backends.megatron_utils.weights import MegatronWeights

    architecture = read_architecture(origin_hf_dir)
    with _world() as sizes:
        model = _model(architecture, sizes, dtype)
        load_weights(Path(input_dir), [model])
        export_hf(output_dir, MegatronWeights([model], architecture, dtype, torch.device("cpu")), origin_hf_dir)


def _dtype(name: str) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def main_to_torch_dist(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hugging Face directory -> Megatron torch_dist checkpoint")
    parser.add_argument("--hf-checkpoint", required=True, help="Hugging Face directory to read")
    parser.add_argument("--save", required=True, help="checkpoint directory to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args(argv)
    hf_to_torch_dist(args.hf_checkpoint, args.save, _dtype(args.dtype))
    return 0


def main_to_hf(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Megatron torch_dist checkpoint -> Hugging Face directory")
    parser.add_argument("--input-dir", required=True, help="one iteration: SAVE/iter_0000012")
    parser.add_argument("--output-dir", required=True, help="Hugging Face directory to write")
    parser.add_argument("--origin-hf-dir", required=True, help="where config, tokenizer and names come from")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--force", action="store_true", help="replace the output directory")
    args = parser.parse_args(argv)
    if Path(args.output_dir).exists() and not args.force:
        parser.error(f"--output-dir {args.output_dir} exists: name a new directory or add --force")
    torch_dist_to_hf(args.input_dir, args.output_dir, args.origin_hf_dir, _dtype(args.dtype))
    return 0
