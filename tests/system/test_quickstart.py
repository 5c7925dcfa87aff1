"""`slime quickstart`, shortened: both runs, the report, the closing line; disaggregated to cover the two pools."""

import html
import os
import re
import subprocess
import sys

import pytest

from tests.system.runs import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


def quickstart(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "slime.cli", "quickstart", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_shortened(tmp_path):
    out = tmp_path / "out"
    done = quickstart("--disaggregate", "--sft-steps", "4", "--rollouts", "1", "--seed", "5", "--output-dir", str(out))
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"held-out accuracy \d\.\d\d -> \d\.\d\d \(seed 5\)", last)
    assert done.stdout.count("slime train --") == 2
    report = html.unescape((out / "report.html").read_text())
    assert report.count("<svg") >= 4 and "####" in report and last.split(" (")[0].split("accuracy ")[1] in report
    assert "http://" not in report.replace("http://www.w3.org", "") and "https://" not in report
    assert {path.name for path in (out / "grpo" / "logs").glob("engine-*")} == {"engine-0.log", "engine-1.log"}
    assert (out / "model-rl" / "model.safetensors").exists()

    again = quickstart("--output-dir", str(out))
    assert again.returncode == 2 and "exists" in again.stderr
