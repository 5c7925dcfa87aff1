"""Hugging Face directory with block-wise FP8 weights -> the same in bfloat16, to train from; see --help."""

import sys

from slime.weight_sync.fp8_convert import main_to_bf16

if __name__ == "__main__":
    sys.exit(main_to_bf16())
