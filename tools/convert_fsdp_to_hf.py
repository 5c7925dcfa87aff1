"""Checkpoint of the FSDP trainer -> Hugging Face directory; see --help."""

import sys

from slime.backends.fsdp_utils.convert import main

if __name__ == "__main__":
    sys.exit(main())
