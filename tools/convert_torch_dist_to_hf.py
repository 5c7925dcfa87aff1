"""Megatron torch_dist checkpoint -> Hugging Face directory; see --help."""

import sys

from slime.backends.megatron_utils.convert import main_to_hf

if __name__ == "__main__":
    sys.exit(main_to_hf())
