import sys

from slime.cli import main

sys.exit(main(["train-async", *sys.argv[1:]]))
