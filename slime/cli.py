"""The `slime` command. Subcommands are imported when they run, so that help and errors come at once."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

from slime import __version__

COMMANDS = {
    "quickstart": ("slime.quickstart", "train a tiny language model by RL on this machine, in minutes"),
    "train": ("slime.train", "run the loop: generate, train, sync weights (same as python train.py)"),
    "train-async": ("slime.train_async", "the same with generation beside training (same as python train_async.py)"),
    "test-hooks": ("slime.testing.__main__", "test functions that you give to train: --custom-rm-path my.module.fn"),
    "data": ("slime.data_check", "`slime data check FILE ...` lists every row of prompt data that cannot be used"),
    "replay-reward": ("slime.debug.replay_reward", "reward the responses of a rollout dump again"),
    "show-dump": ("slime.debug.show_dump", "show what is in a dump"),
    "convert": ("slime.convert", "convert checkpoints: hf-to-torch-dist, torch-dist-to-hf, fsdp-to-hf, hf-to-fp8"),
    "doctor": ("slime.doctor", "check this machine and what is installed on it"),
    "flags": ("slime.arguments.reference", "list the flags of train; `slime flags lr` those that match"),
}


def usage() -> str:
    """The text of `slime --help`."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: slime COMMAND [FLAGS]\n\n"
        "LLM post-training by reinforcement learning.\n\n"
        f"commands:\n{commands}\n\n"
        "slime COMMAND --help shows the flags of a command, slime --version the version."
    )


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit code (2: no such command, 130: Ctrl-C)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name in ("-V", "--version", "version"):
        print(f"slime {__version__}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean slime {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        print(f"slime: no command {name!r}; {hint}", file=sys.stderr)
        return 2
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as with `python train.py`: user functions lie beside the command
    try:
        return importlib.import_module(COMMANDS[name][0]).main(rest) or 0
    except KeyboardInterrupt:  # while something was imported: a run catches it itself
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
