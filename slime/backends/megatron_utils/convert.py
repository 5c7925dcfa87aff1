"""Between Megatron's torch_dist checkpoints and Hugging Face directories, tensor by tensor, in one process on CPU."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from slime.backends.megatron_utils import compat
from slime.backends.megatron_utils.architecture import (
    Architecture,
    UnsupportedModelError,
    read_architecture,
)
from slime.backends.megatron_utils.hf_export import SHARD_BYTES, draft_layer_names
from slime.utils.checkpoint_files import QuantisedError, refuse_quantised


@contextmanager
def _model_without_memory(
    architecture: Architecture, dtype: torch.dtype, with_drafts: bool
) -> Iterator[torch.nn.Module]:
    """The whole model, of tensors without memory, in a world of this process alone.

    Args:
        with_drafts: with its layers for multi-token prediction.
    """
    compat.install()
    from slime.backends.megatron_utils.lazy import without_memory
    from slime.backends.megatron_utils.model_config import transformer_config
    from slime.backends.megatron_utils.model_provider import build_model
    from slime.backends.megatron_utils.parallel import ParallelSizes, destroy_parallel, init_parallel

    sizes = ParallelSizes()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_parallel(sizes, seed=0, timeout_minutes=30)
    try:
        drafts = {"mtp_num_layers": architecture.mtp_layers} if with_drafts else {}
        with without_memory():
            config = transformer_config(architecture, sizes, dtype, torch.device("cpu"), **drafts)
            model = build_model(architecture, config)
        yield model
    finally:
        destroy_parallel()
        dist.destroy_process_group()


def hf_to_torch_dist(hf_checkpoint: str, save: str, dtype: torch.dtype) -> None:
    """Write the weights as a checkpoint of rollout 0 under `save`, for --ref-load, or --load with --finetune."""
    architecture = read_architecture(hf_checkpoint)
    refuse_quantised(hf_checkpoint)
    with _model_without_memory(architecture, dtype, bool(draft_layer_names(hf_checkpoint))) as model:
        from slime.backends.common.checkpoint import Progress
        from slime.backends.megatron_utils.checkpoint import save_checkpoint
        from slime.backends.megatron_utils.hf_files import HFTensors
        from slime.backends.megatron_utils.lazy import LazySave
        from slime.backends.megatron_utils.weights import NameMap, global_tensors

        names, parameters = NameMap(architecture), global_tensors([model])
        with HFTensors(hf_checkpoint) as checkpoint:

            def tensor_of(name: str) -> torch.Tensor:
                source = names.source(name)
                parts = [checkpoint[hf_name] for hf_name in source.hf_names]
                value = source.layout.shard(parts, 0, 1, parameters[name].shape[0])
                return value.to(parameters[name].dtype)

            save_checkpoint(save, 0, [model], None, Progress(), strategy=LazySave(model, tensor_of))


def torch_dist_to_hf(
    input_dir: str, output_dir: str, origin_hf_dir: str, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights of one iteration's directory with config, tokenizer and names of `origin_hf_dir`."""
    architecture = read_architecture(origin_hf_dir)
    refuse_quantised(origin_hf_dir)  # its config.json would be the output's
    stored = FileSystemReader(input_dir).read_metadata().state_dict_metadata
    with_drafts = any(name.startswith("mtp.") for name in stored)
    with _model_without_memory(architecture, dtype, with_drafts) as model:
        from slime.backends.megatron_utils.hf_export import export_hf
        from slime.backends.megatron_utils.lazy import LazyWeights

        weights = LazyWeights(model, architecture, dtype, Path(input_dir))
        export_hf(output_dir, weights, origin_hf_dir, shard_bytes)


def main_to_torch_dist(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Hugging Face directory -> Megatron torch_dist checkpoint",
        epilog="Architecture flags under Megatron's names (scripts/models/*.sh) may be given, too: they are compared "
        "with the checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument("--hf-checkpoint", required=True, help="Hugging Face directory to read")
    parser.add_argument("--save", required=True, help="checkpoint directory to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args, described = parser.parse_known_args(argv)
    _refuse_several_processes(parser)
    from slime.arguments.problems import ConfigError
    from slime.arguments.validation.megatron import check_model_flags

    try:
        check_model_flags(args.hf_checkpoint, described)
        hf_to_torch_dist(args.hf_checkpoint, args.save, getattr(torch, args.dtype))
    except ConfigError as error:
        parser.error(str(error).strip())
    except (FileNotFoundError, KeyError, UnsupportedModelError, QuantisedError) as error:
        parser.error(f"--hf-checkpoint {args.hf_checkpoint}: {error}")
    return 0


def _refuse_several_processes(parser: argparse.ArgumentParser) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("one process converts, whatever the model's size: start it with python, not with torchrun")


def main_to_hf(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Megatron torch_dist checkpoint -> Hugging Face directory")
    parser.add_argument("--input-dir", required=True, help="one iteration: SAVE/iter_0000012")
    parser.add_argument("--output-dir", required=True, help="Hugging Face directory to write")
    parser.add_argument("--origin-hf-dir", required=True, help="where config, tokenizer and names come from")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--chunk-size", type=int, default=SHARD_BYTES, help="bytes per file (and of memory) at most")
    parser.add_argument("--vocab-size", type=int, help="of the origin; what pads it is left out in any case")
    parser.add_argument("--force", action="store_true", help="replace the output directory")
    args = parser.parse_args(argv)
    _refuse_several_processes(parser)
    if Path(args.output_dir).exists() and not args.force:
        parser.error(f"--output-dir {args.output_dir} exists: name a new directory or add --force")
    if not (Path(args.input_dir) / "metadata.json").is_file():
        parser.error(f"--input-dir {args.input_dir} holds no torch_dist checkpoint: give SAVE/iter_0000012")
    dtype = getattr(torch, args.dtype)
    try:
        vocab_size = read_architecture(args.origin_hf_dir).vocab_size
        if args.vocab_size not in (None, vocab_size):
            parser.error(f"--vocab-size {args.vocab_size}: --origin-hf-dir {args.origin_hf_dir} has {vocab_size}")
        torch_dist_to_hf(args.input_dir, args.output_dir, args.origin_hf_dir, dtype, args.chunk_size)
    except (FileNotFoundError, UnsupportedModelError, QuantisedError) as error:
        parser.error(f"--origin-hf-dir {args.origin_hf_dir}: {error}")
    return 0
