import subprocess
import sys

import pytest

from slime.ray.temp_dir import RayTempDir

pytestmark = pytest.mark.unit


def test_directories_of_killed_runs_go_and_living_ones_stay(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from slime.ray.temp_dir import RayTempDir\n"
        "print(RayTempDir(Path(sys.argv[1])).path, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True).stdout.strip()
    assert [str(path) for path in tmp_path.iterdir()] == [killed]
    first = RayTempDir(tmp_path)
    second = RayTempDir(tmp_path)
    assert set(tmp_path.iterdir()) == {first.path, second.path}
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []
