"""`slime quickstart`: a tiny language model learns by RL on two CPU cores, through the same loop as any other run."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from slime.quickstart import recipe as recipes
from slime.quickstart.model import SHAPES
from slime.quickstart.recipe import Paths, Recipe


def main(argv: list[str] | None = None) -> int:
    """Make the task, run SFT and GRPO as `slime train` commands, write the report; returns the exit code."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    paths = Paths(options.output_dir.resolve())
    try:
        paths.root.mkdir(parents=True)
    except FileExistsError:
        print(f"slime quickstart: --output-dir {options.output_dir} exists: name a new directory", file=sys.stderr)
        return 2
    recipe = Recipe(
        seed=options.seed,
        rollouts=options.rollouts,
        sft_steps=options.sft_steps,
        disaggregate=options.disaggregate,
        device=options.device,
        train_backend=options.train_backend,
        model=options.model,
        extra=tuple(options.extra),
    )
    return run(recipe, paths)


def run(recipe: Recipe, paths: Paths) -> int:
    from slime.quickstart.report import Outcome, write_report
    from slime.quickstart.tasks import Task

    started = time.monotonic()
    task = Task.make(recipe.seed)
    parameters = recipes.write_inputs(recipe, task, paths)
    print(f"Made up a task, a tokenizer and a random Qwen3 with {parameters:,} parameters in {paths.root}", flush=True)
    seconds = {"preparation": time.monotonic() - started}
    commands = {"SFT": recipes.sft_flags(recipe, paths), "GRPO": recipes.grpo_flags(recipe, paths)}
    for name, flags in commands.items():
        started = time.monotonic()
        code = train(name, flags)
        if code != 0:
            print(f"slime quickstart: {name} ended with exit code {code}", file=sys.stderr)
            return code
        seconds[name] = time.monotonic() - started
    outcome = Outcome.read(recipe, paths)
    write_report(outcome, task, commands, seconds)
    print("\n" + outcome.curve())
    print(f"sampled at temperature 1: {outcome.sampled[0][1]:.2f} -> {outcome.sampled[-1][1]:.2f}")
    print(f"report: {paths.report}")
    print(outcome.headline())
    return 0


def train(name: str, flags: list[str]) -> int:
    """Run `slime train` with these flags as a process of its own; returns its exit code."""
    print(f"\n{name}: slime train {shlex.join(flags)}\n", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "slime.cli", "train", *flags])
    try:
        return process.wait()
    except KeyboardInterrupt:
        return process.wait()  # Ctrl-C reached it too: it ends its own processes


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    own, extra = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        prog="slime quickstart",
        description="Train a tiny language model on this machine: a little SFT, then GRPO with a verifiable reward.",
        epilog="Flags after -- are added to both `slime train` commands.",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of task, model and sampling [0]")
    parser.add_argument("--disaggregate", action="store_true", help="two engines apart from the trainer")
    parser.add_argument("--rollouts", type=_positive, default=recipes.GRPO_ROLLOUTS, help="GRPO steps [%(default)s]")
    parser.add_argument("--sft-steps", type=_positive, default=recipes.SFT_STEPS, help="SFT steps [%(default)s]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="[cpu]")
    parser.add_argument("--model", choices=tuple(SHAPES), default="tiny", help="shape of the model [tiny]")
    parser.add_argument("--train-backend", choices=("fsdp", "megatron"), default="fsdp", help="trainer [fsdp]")
    parser.add_argument("--output-dir", type=Path, help="a new directory [runs/quickstart-<time>-seed<N>]")
    options = parser.parse_args(own)
    if options.output_dir is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        options.output_dir = Path("runs") / f"quickstart-{stamp}-seed{options.seed}"
    options.extra = extra
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
