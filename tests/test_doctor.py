"""`slime doctor`: what it says, and that each problem comes with a fix."""

import subprocess
import sys
import time

import pytest

from slime import doctor
from slime.backends.sglang_utils import compat

pytestmark = pytest.mark.unit


def with_versions(monkeypatch, **versions):
    monkeypatch.setattr(doctor, "installed", lambda package: versions.get(package.replace("-", "_")))
    monkeypatch.setattr(compat, "installed_version", lambda: versions.get("sglang"))


@pytest.mark.parametrize(
    "versions, status, words",
    [
        ({"torch": "2.13.0", "transformers": "5.23.0"}, doctor.OK, "fit together"),
        ({"torch": "2.9.1", "transformers": "5.23.0"}, doctor.PROBLEM, "torch 2.9.1"),
        ({"torch": "2.13.0", "transformers": "4.57.0"}, doctor.PROBLEM, "transformers 4.57.0"),
        ({"sglang": "0.5.17", "torch": "2.11.0", "transformers": "5.12.1"}, doctor.OK, "SGLang 0.5.17"),
        ({"sglang": "0.5.17", "torch": "2.13.0", "transformers": "5.12.1"}, doctor.PROBLEM, "built for torch 2.11.0"),
        ({"sglang": "0.5.20", "torch": "2.11.0+cpu", "transformers": "5.12.1"}, doctor.NOTE, "torch 2.13.0"),
        ({"sglang": "0.5.23", "torch": "2.14.1", "transformers": "5.23.0"}, doctor.NOTE, "pins transformers 5.19.0"),
        ({"sglang": "0.7.0", "torch": "2.14.1", "transformers": "5.23.0"}, doctor.NOTE, "newer than"),
        ({"megatron_core": "0.21.0", "psutil": "7.0"}, doctor.NOTE, "megatron-core 0.21.0"),
        ({"megatron_core": "0.16.1"}, doctor.PROBLEM, "psutil"),
    ],
)
def test_versions_that_do_not_fit(monkeypatch, versions, status, words):
    with_versions(monkeypatch, **versions)
    findings = [finding for finding in doctor.check_versions() if words in finding.what]
    assert [finding.status for finding in findings] == [status]
    assert findings[0].fix or status != doctor.PROBLEM


def test_missing_packages(monkeypatch):
    with_versions(monkeypatch, torch="2.13.0")
    findings = {finding.what.split()[0]: finding for finding in doctor.check_packages()}
    assert findings["torch"].status == doctor.OK
    assert findings["ray"].status == doctor.PROBLEM and findings["ray"].fix == "pip install ray"


def test_small_shared_memory_few_files_and_a_full_disk(monkeypatch):
    usage = type("Usage", (), {"free": doctor.GIB, "total": 2 * doctor.GIB})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (1024, 65536))
    for finding in [*doctor.check_shared_memory(), *doctor.check_disk(), *doctor.check_limits()]:
        assert finding.status == doctor.NOTE and finding.fix
    assert "ulimit -n 65536" in str(doctor.check_limits()[0])


def test_gpus(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    lines = "NVIDIA H100, 81559, 0\nNVIDIA H100, 81559, 40000\n"
    done = subprocess.CompletedProcess([], 0, stdout=lines)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: done)
    free, busy, *_ = doctor.check_gpus()
    assert free.status == doctor.OK and "80 GiB" in free.what
    assert busy.status == doctor.NOTE and "CUDA_VISIBLE_DEVICES" in busy.fix


@pytest.mark.integration
def test_the_command():
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "slime.cli", "doctor"], capture_output=True, text=True, timeout=60)
    for title in doctor.CHECKS:
        assert title in done.stdout
    assert done.returncode == ("PROBLEM" in done.stdout)
    assert time.monotonic() - start < 20
