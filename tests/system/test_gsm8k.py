"""examples/gsm8k on real rows with a tiny random model and the real grader."""

import json
import os
import subprocess
import sys
from itertools import islice

import pytest

from slime.quickstart.tokenizer import train_tokenizer
from tests.system.runs import ROOT, read_jsonl
from tests.tiny_model import save_tiny_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]
DATA = ROOT / "data" / "gsm8k"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A random model with a tokenizer trained on the questions."""
    path = tmp_path_factory.mktemp("gsm8k-model")
    with (DATA / "train.jsonl").open() as file:
        rows = [json.loads(line) for line in islice(file, 300)]
    save_tiny_model(str(path), vocab_size=1024, max_position_embeddings=1024, eos_token_id=2)
    train_tokenizer((row["question"] + row["answer"] for row in rows), vocab_size=1024).save_pretrained(path)
    return str(path)


def test_example_runs_on_real_rows(tmp_path, model, local_ray):
    flags = ["--device", "cpu", "--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
    flags += ["--global-batch-size", "16", "--rollout-max-response-len", "24", "--eval-max-response-len", "24"]
    flags += [
        "--prompt-data",
        f"{DATA / 'train.jsonl'}@[:64]",
        "--eval-prompt-data",
        "gsm8k",
        f"{DATA / 'test.jsonl'}@[:8]",
    ]
    flags += [
        "--run-dir",
        str(tmp_path / "run"),
        "--save",
        str(tmp_path / "save"),
        "--eval-interval",
        "2",
        "--ci-test",
    ]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(
        ["examples/gsm8k/run.sh", model, *flags],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": local_ray},
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert done.returncode == 0, done.stderr
    questions = {row["question"] for row in read_jsonl(DATA / "train.jsonl")[:64]}
    samples = [s for i in range(2) for s in read_jsonl(tmp_path / "run" / "samples" / f"rollout_{i:06d}.jsonl")]
    assert samples and all(any(question in s["prompt"] for question in questions) for s in samples)
    assert all(s["reward"] in (0, 1) and "####" in s["label"] for s in samples)
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [m["eval/step"] for m in metrics if "eval/gsm8k" in m] == [0, 2]
    assert len([m for m in metrics if "train/loss" in m]) == 2
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
