"""The runs of benchmarks/algorithms.py: flags that `slime train` takes, and tests of the formulas they use."""

import shutil

import pytest

from benchmarks.algorithms import ALGORITHMS, AlgorithmPaths, curve, flags_of, table
from slime.arguments.entry import load_args
from slime.quickstart.recipe import Recipe, write_inputs
from slime.quickstart.tasks import Task

pytestmark = pytest.mark.unit
ROLLOUTS = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What a benchmark finds after SFT and the run `grpo`."""
    root = tmp_path_factory.mktemp("algorithms")
    paths = AlgorithmPaths(root, "grpo")
    write_inputs(Recipe(0, ROLLOUTS, sft_steps=4), Task.make(0), paths)
    for model in (paths.sft_model, paths.rl_model):
        shutil.copytree(paths.random_model, model)
    return root


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_flags_are_accepted(directory, name):
    args = load_args(flags_of(name, directory, ROLLOUTS), asynchronous=ALGORITHMS[name].stale)
    assert args.rollout_batch_size * args.n_samples_per_prompt == 2 * args.global_batch_size
    assert args.colocate != ALGORITHMS[name].stale


def test_the_table_names_tests_that_exist():
    result = {"held_out_greedy": [0.25, 0.75], "reward": [0.0, 1.0]}
    lines = table(dict.fromkeys(ALGORITHMS, result)).splitlines()
    assert len(lines) == 2 + len(ALGORITHMS)
    assert lines[-1] == "| `opsm` | test_losses.py | `opsm` | 0.25 -> 0.75 | ▁█ |"


def test_a_curve_is_a_block_for_every_few_rollouts():
    assert curve([0.0, 0.0, 0.5, 0.5, 1.0, 1.0], points=3) == "▁▅█"
