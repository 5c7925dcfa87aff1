"""Hugging Face directory with block-wise FP8 weights -> the same in bfloat16, to train from; see --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime.weight_sync.fp8_files import to_bf16


def main(argv: list[str] | None = None) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
