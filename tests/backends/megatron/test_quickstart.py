"""The whole loop on two Megatron processes: Ray, engine, weight sync, checkpoint, export."""

import json
import subprocess
import sys

import pytest


@pytest.mark.system
def test_a_shortened_quickstart(tmp_path):
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "slime.cli",
        "quickstart",
        "--train-backend",
        "megatron",
        "--output-dir",
        str(out),
    ]
    done = subprocess.run(
        [*command, "--sft-steps", "2", "--rollouts", "2", "--", "--ci-test", "--check-weight-update-equal"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (out / "grpo" / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "train/kl_loss" in row)
    assert first["train/kl_loss"] == 0 and first["train/ppo_kl"] == 0
    assert (out / "model-rl" / "model.safetensors").is_file()
    assert (out / "grpo" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
