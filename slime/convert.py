"""`slime convert`: between the formats of checkpoints. Each command is also a script in tools/."""

from __future__ import annotations

import difflib
import importlib
import sys

COMMANDS = {
    "hf-to-torch-dist": (
        "slime.backends.megatron_utils.convert:main_to_torch_dist",
        "Hugging Face directory -> Megatron torch_dist checkpoint",
    ),
    "torch-dist-to-hf": (
        "slime.backends.megatron_utils.convert:main_to_hf",
        "Megatron torch_dist checkpoint -> Hugging Face directory",
    ),
    "fsdp-to-hf": (
        "slime.backends.fsdp_utils.convert:main",
        "checkpoint of the FSDP trainer -> Hugging Face directory",
    ),
    "hf-to-fp8": ("slime.weight_sync.fp8_convert:main_to_fp8", "bfloat16 -> block-wise FP8, for engines"),
    "fp8-to-bf16": ("slime.weight_sync.fp8_convert:main_to_bf16", "block-wise FP8 -> bfloat16, to train from"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one conversion; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:<18}{text}" for name, (_, text) in COMMANDS.items())
        shown = f"usage: slime convert KIND [FLAGS]\n\n{lines}\n\nslime convert KIND --help shows the flags."
        print(shown, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        print(f"slime convert: no conversion {name!r}; {hint}", file=sys.stderr)
        return 2
    module, function = COMMANDS[name][0].split(":")
    sys.argv[0] = f"slime convert {name}"
    return getattr(importlib.import_module(module), function)(rest)
