"""Every example as a user runs it, cut short."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.system.runs import ROOT, read_jsonl

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]
SMALL = ["--sft-steps", "2", "--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
SMALL += ["--global-batch-size", "16"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Shared, so that the quickstart's model is made once."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module", autouse=True)
def joined_ray(local_ray):
    """All runs join one Ray, which saves them its start."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_ADDRESS", local_ray)
        yield


def run(name, work, *flags, code=0):
    command = [sys.executable, "-m", f"examples.{name}.run", "--work", str(work / name), *SMALL, *flags]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def metrics(path):
    return [line for line in read_jsonl(path / "metrics.jsonl") if "rollout/step" in line]


def test_fully_async(work):
    run("fully_async", work, "--over-sampling-batch-size", "6")
    lines = metrics(work / "fully_async" / "run")
    assert len(lines) == 2 and all("rollout/fully_async/running_groups" in line for line in lines)
    assert max(line["rollout/staleness/max"] for line in lines) <= 2  # its --max-weight-staleness


def test_eval_multi_task(work):
    run("eval_multi_task", work, "--eval-interval", "2", "--skip-eval-before-train")
    lines = read_jsonl(work / "eval_multi_task" / "run" / "metrics.jsonl")
    (last,) = [line for line in lines if "eval/step" in line]
    assert {"eval/greedy", "eval/sampled", "eval/format", "eval/sampled-pass@4"} <= last.keys()


def test_reproducibility(work):
    assert "bit-equal" in run("reproducibility", work)


def test_true_on_policy(work):
    output = run("true_on_policy", work)
    assert output.count("|trainer - engine| log-prob 0.0\n") == 2


@pytest.mark.parametrize("name", ["retool", "search_r1", "multi_agent"])
def test_multi_turn(work, name):
    run(name, work)
    path = work / name / "run"
    lines = metrics(path)
    assert len(lines) == 2
    assert min(line["multi_turn/multi_turn_metric/round_number_min"] for line in lines) >= 1
    counts = [Counter(line["sample_indices"]) for line in read_jsonl(path / "trained.jsonl")]
    assert [sorted(count) for count in counts] == [list(range(16)), list(range(16, 32))]
    # Each trajectory of the agents is at least the solver's conversation and the checker's.
    pieces = [number for count in counts for number in count.values()]
    assert min(pieces) >= 2 if name == "multi_agent" else set(pieces) == {1}
