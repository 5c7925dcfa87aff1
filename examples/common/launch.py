"""The command line of every example: `python -m examples.NAME.run [--model DIR] [--work DIR] [slime train flags]`."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TINY = {
    "--train-backend": "fsdp",
    "--device": "cpu",
    "--actor-num-gpus-per-node": 1,
    "--use-dynamic-batch-size": None,
    "--max-tokens-per-gpu": 4096,
    "--adam-beta2": 0.98,
}
"""For the tiny models; a real model's flags come from the command line."""


@dataclass(frozen=True)
class Options:
    model: Path | None
    """A Hugging Face directory; None: make a tiny one."""
    work: Path
    flags: list[str]
    """Flags of slime train, which override the example's."""
    sft_steps: int
    """How long the tiny model looks at demonstrations first."""

    def settings(self) -> dict[str, object]:
        return {} if self.model else dict(TINY)


def parse(name: str, description: str, argv: Sequence[str] | None, sft_steps: int) -> Options:
    parser = argparse.ArgumentParser(
        prog=f"python -m examples.{name}.run",
        description=description,
        epilog="All other flags go to slime train and override those of the example.",
    )
    parser.add_argument("--model", type=Path, help="a Hugging Face directory [a tiny model, made here]")
    parser.add_argument("--work", type=Path, default=Path("runs") / "examples" / name, help="directory [%(default)s]")
    parser.add_argument("--sft-steps", type=int, default=sft_steps, help="of the tiny model [%(default)s]")
    options, flags = parser.parse_known_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    return Options(options.model, options.work.resolve(), flags, options.sft_steps)


def slime(command: str, flags: dict[str, object], extra: Sequence[str] = ()) -> None:
    """Run a slime command in a process of its own; ends this one when it fails."""
    words = [str(word) for item in flags.items() for word in item if word is not None]
    words += [str(word) for word in extra]
    print(f"\nslime {command} {shlex.join(words)}\n", flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    code = subprocess.call([sys.executable, "-m", "slime.cli", command, *words], env=environment)
    if code != 0:
        raise SystemExit(code)
