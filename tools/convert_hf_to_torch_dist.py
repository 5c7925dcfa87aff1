"""Hugging Face directory -> Megatron torch_dist checkpoint; see --help."""

import sys

from slime.backends.megatron_utils.convert import main_to_torch_dist

if __name__ == "__main__":
    sys.exit(main_to_torch_dist())
