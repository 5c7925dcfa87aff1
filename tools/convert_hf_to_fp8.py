"""Hugging Face directory in bfloat16 -> the same with block-wise FP8 weights, for engines; see --help."""

import sys

from slime.weight_sync.fp8_convert import main_to_fp8

if __name__ == "__main__":
    sys.exit(main_to_fp8())
