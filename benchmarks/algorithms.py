"""Does every algorithm learn? One short run each of the quickstart's task, from the same SFT checkpoint.

    python benchmarks/algorithms.py                      # all of them, about 100 s each on two CPU cores
    python benchmarks/algorithms.py --only grpo ppo      # some; results of the others are kept
    python benchmarks/algorithms.py --table              # the table of docs/algorithms.md, from the results

Each run is `slime train` (corrections: `slime train-async`, where samples are one update old and the trainer's
log-probs differ from the engine's) with two optimizer steps per rollout, so that ratios, clips and masks have
something to do. benchmarks/results/algorithms.json gets held-out accuracy before and after and the reward of every
rollout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.environment import RESULTS, describe, write_result  # noqa: E402
from slime.quickstart.recipe import (  # noqa: E402
    GREEDY,
    PROMPTS_PER_ROLLOUT,
    SAMPLED,
    SAMPLES_PER_PROMPT,
    Paths,
    Recipe,
    grpo_flags,
    sft_flags,
    write_inputs,
)
from slime.quickstart.tasks import Task  # noqa: E402

SEED = 0
STEPS_PER_ROLLOUT = 2
LEARNED = 0.15
"""An algorithm learned when greedy held-out accuracy rose by at least this."""


@dataclass(frozen=True)
class Algorithm:
    """Flags on top of the quickstart's."""

    case: str
    """The case of tests/training/test_parallel.py with its formulas."""
    flags: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    """Train metrics whose mean over the run shows that the algorithm's own part did something."""
    stale: bool = False
    """Generation runs beside training."""
    teacher: bool = False
    """Distils the model that the run `grpo` ended with."""
    reference: str = "test_losses.py"
    """The file of tests/training that compares the formulas with a float64 reference."""


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TIS = words("--use-tis")
ICEPOP = words("--use-tis --custom-tis-function-path slime.training.corrections.icepop_function --tis-clip-low 0.5")
MIS = words("--use-tis --custom-tis-function-path slime.training.mis.mis_function")
REINFORCE = words("--normalize-advantages --kl-loss-coef 0 --kl-coef 0.001 --advantage-estimator")
PPO = words("--advantage-estimator ppo --normalize-advantages --lambd 0.95 --num-critic-only-steps 3")
GSPO = words("--advantage-estimator gspo --eps-clip 0.03 --eps-clip-high 0.04")
CISPO = words("--advantage-estimator cispo --eps-clip 1 --eps-clip-high 1")
DISTILLATION = words("--advantage-estimator on_policy_distillation")
GEOMETRIC = words("--mis-level geometric --mis-mode mask --mis-veto-threshold 0.001")
BOUNDS = ("mis_low_frac", "mis_high_frac")
OF_ADVANTAGES = {"reference": "test_advantages.py"}

ALGORITHMS = {
    "grpo": Algorithm("grpo", watched=("pg_clipfrac",)),
    "grpo_without_std": Algorithm(
        "grpo", words("--disable-grpo-std-normalization"), ("pg_clipfrac",), reference="test_rewards.py"
    ),
    "grpo_dual_clip": Algorithm("dual_clip", words("--eps-clip-c 3"), ("pg_clipfrac",)),
    "gspo": Algorithm("gspo", GSPO, ("pg_clipfrac",)),
    "cispo": Algorithm("cispo", CISPO, ("pg_clipfrac",)),
    "reinforce_plus_plus": Algorithm(
        "reinforce_plus_plus", (*REINFORCE, "reinforce_plus_plus"), ("kl_loss",), **OF_ADVANTAGES
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "reinforce_plus_plus_baseline", (*REINFORCE, "reinforce_plus_plus_baseline"), ("kl_loss",), **OF_ADVANTAGES
    ),
    "ppo": Algorithm("ppo", PPO, ("critic-value_loss",), **OF_ADVANTAGES),
    "on_policy_distillation": Algorithm("on_policy_distillation", DISTILLATION, teacher=True, **OF_ADVANTAGES),
    "grpo_with_distillation": Algorithm(
        "grpo_distilled", words("--use-opd --opd-kl-coef 0.5"), ("opd_reverse_kl",), teacher=True, **OF_ADVANTAGES
    ),
    "tis": Algorithm("tis", TIS, ("tis", "tis_clipfrac", "tis_abs"), stale=True),
    "icepop": Algorithm("icepop", ICEPOP, ("tis", "tis_clipfrac"), stale=True),
    "mis_token_mask": Algorithm("mis_token_mask", (*MIS, "--mis-mode", "mask"), BOUNDS, stale=True),
    "mis_sequence": Algorithm("mis_sequence", (*MIS, "--mis-level", "sequence"), ("mis_high_frac",), stale=True),
    "mis_geometric": Algorithm("mis_geometric", (*MIS, *GEOMETRIC), (*BOUNDS, "mis_veto_frac"), stale=True),
    "opsm": Algorithm("opsm", words("--use-opsm --opsm-delta 0.01"), ("opsm_clipfrac",), stale=True),
}


@dataclass(frozen=True)
class AlgorithmPaths(Paths):
    """The quickstart's files, with a run of its own for each algorithm."""

    name: str

    @property
    def grpo_run(self) -> Path:
        return self.root / self.name

    @property
    def rl_model(self) -> Path:
        return self.grpo_run / "model"


def slime(command: str, flags: list[str], log: Path) -> float:
    """Run `slime COMMAND`; the seconds it took. Its output goes to `log`.

    Raises:
        RuntimeError: it failed; says how its output ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with open(log, "w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "slime.cli", command, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    if done.returncode != 0:
        raise RuntimeError(
            f"slime {' '.join([command, *flags])} exited with {done.returncode}:\n{log.read_text()[-4000:]}"
        )
    return time.monotonic() - started


def prepare(directory: Path, rollouts: int) -> None:
    """Data and the SFT checkpoint that all algorithms start from, unless they are there."""
    recipe, paths = Recipe(SEED, rollouts), Paths(directory)
    if paths.sft_model.exists():
        return
    write_inputs(recipe, Task.make(SEED), paths)
    slime("train", sft_flags(recipe, paths), directory / "sft.log")


def flags_of(name: str, directory: Path, rollouts: int) -> list[str]:
    """The flags of an algorithm's run; later ones win."""
    algorithm = ALGORITHMS[name]
    paths = AlgorithmPaths(directory, name)
    flags = grpo_flags(Recipe(SEED, rollouts, disaggregate=algorithm.stale), paths)
    if algorithm.stale:
        flags += ["--rollout-num-gpus", "1"]
    samples = PROMPTS_PER_ROLLOUT * SAMPLES_PER_PROMPT
    flags += ["--global-batch-size", str(samples // STEPS_PER_ROLLOUT), "--eval-interval", str(rollouts)]
    flags += ["--no-save-optim", *algorithm.flags]
    if algorithm.teacher:
        flags += ["--opd-teacher-load", str(AlgorithmPaths(directory, "grpo").rl_model)]
    return flags


def outcome(name: str, directory: Path, seconds: float) -> dict:
    """What the run's metrics say."""
    text = (AlgorithmPaths(directory, name).grpo_run / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]

    def series(key: str) -> list[float]:
        return [round(line[key], 5) for line in lines if key in line]

    def mean(key: str) -> float:
        values = series(f"train/{key}")
        if not values:
            raise RuntimeError(f"the run has no metric train/{key}")
        return round(sum(values) / len(values), 5)

    greedy, sampled = series(f"eval/{GREEDY}"), series(f"eval/{SAMPLED}")
    return {
        "flags": list(ALGORITHMS[name].flags),
        "asynchronous": ALGORITHMS[name].stale,
        "held_out_greedy": [greedy[0], greedy[-1]],
        "held_out_sampled": [sampled[0], sampled[-1]],
        "learns": greedy[-1] - greedy[0] >= LEARNED,
        "mean_metrics": {key: mean(key) for key in ALGORITHMS[name].watched},
        "reward": series("rollout/raw_reward"),
        "seconds": round(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(ALGORITHMS), default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--work-dir", type=Path, help="keep runs here, and use the SFT checkpoint that is here")
    parser.add_argument("--no-result", action="store_true", help="print only")
    parser.add_argument("--table", action="store_true", help="print what is known as a table")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads((RESULTS / "algorithms.json").read_text())["algorithms"]))
        return
    directory = options.work_dir.resolve() if options.work_dir else Path(tempfile.mkdtemp(prefix="slime-algorithms-"))
    prepare(directory, options.rollouts)
    for name in options.only:
        made = "grpo" in options.only or AlgorithmPaths(directory, "grpo").rl_model.exists()
        if ALGORITHMS[name].teacher and not made:
            parser.error(f"{name} distils the model of the run grpo, which {directory} does not have: run it first")
    failed = []
    for name in options.only:
        try:
            result = run(name, directory, options.rollouts)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            failed.append(name)
            continue
        if not options.no_result:
            keep(name, result, options.rollouts)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str, directory: Path, rollouts: int) -> dict:
    """One algorithm's run; what its metrics say."""
    command = "train-async" if ALGORITHMS[name].stale else "train"
    result = outcome(name, directory, slime(command, flags_of(name, directory, rollouts), directory / f"{name}.log"))
    first, last = result["held_out_greedy"]
    verdict = "learns" if result["learns"] else "DOES NOT LEARN"
    print(
        f"{name}: {first:.2f} -> {last:.2f} in {result['seconds']} s, {verdict}, {result['mean_metrics']}", flush=True
    )
    return result


def keep(name: str, result: dict, rollouts: int) -> None:
    """Put one algorithm's result into benchmarks/results/algorithms.json."""
    path = RESULTS / "algorithms.json"
    known = json.loads(path.read_text())["algorithms"] if path.exists() else {}
    known[name] = {"rollouts": rollouts, "commit": describe()["commit"], **result}
    ordered = {name: known[name] for name in ALGORITHMS if name in known}
    environment = describe("torch", "transformers", "ray")
    del environment["commit"]
    write_result(
        "algorithms",
        {"environment": environment, "seed": SEED, "steps_per_rollout": STEPS_PER_ROLLOUT, "algorithms": ordered},
    )


def table(results: dict[str, dict]) -> str:
    """Markdown: each algorithm with its tests, its held-out accuracy and the reward of its rollouts."""
    from tests.training.test_parallel import CASES

    lines = [
        "| run | float64 reference | parallel = serial | held-out accuracy, greedy | reward of the rollouts |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        algorithm = ALGORITHMS[name]
        if algorithm.case not in CASES or not (ROOT / "tests" / "training" / algorithm.reference).exists():
            raise SystemExit(f"{name}: no test {algorithm.reference} or case {algorithm.case} in tests/training")
        first, last = result["held_out_greedy"]
        cells = [f"`{name}`", algorithm.reference, f"`{algorithm.case}`", f"{first:.2f} -> {last:.2f}"]
        lines.append(f"| {' | '.join([*cells, curve(result['reward'])])} |")
    return "\n".join(lines)


def curve(rewards: list[float], points: int = 15) -> str:
    """Rewards from 0 to 1 as a line of blocks, a block for the mean of a few rollouts."""
    size = max(1, len(rewards) // points)
    means = [sum(part) / len(part) for i in range(0, len(rewards), size) if (part := rewards[i : i + size])]
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(mean * 8)))] for mean in means)


if __name__ == "__main__":
    main()
