"""The commands that convert Hugging Face directories to block-wise FP8 and back."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.weight_sync.fp8 import BLOCK
from slime.weight_sync.fp8_files import to_bf16, to_fp8


def main_to_fp8(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hugging Face directory -> block-wise FP8 (e4m3) for SGLang")
    parser.add_argument("--model-dir", required=True, type=Path, help="Hugging Face directory to read")
    parser.add_argument("--save-dir", required=True, type=Path, help="Hugging Face directory to write")
    parser.add_argument("--strategy", choices=("block",), default="block", help="one scale per block")
    parser.add_argument("--block-size", nargs=2, type=int, default=BLOCK, metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--device", default="cpu", help="what quantises, e.g. cuda")
    args = parser.parse_args(argv)
    if args.save_dir.exists():
        parser.error(f"--save-dir {args.save_dir} exists: name a new directory")
    if min(args.block_size) < 1:
        parser.error(f"--block-size {args.block_size[0]} {args.block_size[1]}: must be positive")
    try:
        count = to_fp8(args.model_dir, args.save_dir, tuple(args.block_size), args.device)
    except (OSError, ValueError) as error:
        parser.error(f"--model-dir: {error}")
    print(f"{count} matrices in FP8 in {args.save_dir}")
    return 0


def main_to_bf16(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hugging Face directory in FP8 -> bfloat16")
    parser.add_argument("--input-fp8-hf-path", required=True, type=Path, help="Hugging Face directory to read")
    parser.add_argument("--output-bf16-hf-path", required=True, type=Path, help="Hugging Face directory to write")
    parser.add_argument("--device", default="cpu", help="what computes, e.g. cuda")
    args = parser.parse_args(argv)
    if args.output_bf16_hf_path.exists():
        parser.error(f"--output-bf16-hf-path {args.output_bf16_hf_path} exists: name a new directory")
    try:
        count = to_bf16(args.input_fp8_hf_path, args.output_bf16_hf_path, args.device)
    except (OSError, ValueError) as error:
        parser.error(f"--input-fp8-hf-path: {error}")
    print(f"{count} matrices in bfloat16 in {args.output_bf16_hf_path}")
    return 0
