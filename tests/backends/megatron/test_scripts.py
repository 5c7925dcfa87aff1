"""Launch scripts: their flags are right for the published models, and a cluster is theirs alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests.backends.megatron.published import CONFIGS

SCRIPTS = Path(__file__).parents[3] / "scripts"
ENV = {**os.environ, "PYTHON": sys.executable}
RUNS = sorted(path.name for path in SCRIPTS.glob("run-*.sh"))
# Engines over several GPUs need SGLang, which is not part of the test environment.
WITHOUT_ENGINES = "--rollout-num-gpus-per-engine 1 --debug-train-only --load-debug-rollout-data none_{rollout_id}.pt"


def dry_run(script: str, model: Path, *flags: str) -> subprocess.CompletedProcess:
    command = [str(SCRIPTS / script), str(model), "--device", "cuda", *WITHOUT_ENGINES.split(), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**ENV, "DRY_RUN": "1"})


def checkpoint(root: Path, script: str) -> Path:
    name = re.search(r"SHAPE=(\S+)", (SCRIPTS / script).read_text())[1]
    (root / "config.json").write_text(json.dumps(CONFIGS[name]))
    (root / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (root / "tokenizer.json").write_text("{}")
    return root


@pytest.mark.integration
@pytest.mark.parametrize("script", RUNS)
def test_flags_are_accepted(tmp_path, script):
    shown = dry_run(script, checkpoint(tmp_path, script))
    assert shown.returncode == 0, shown.stderr
    assert "train_backend: megatron" in shown.stdout
    assert dry_run(script, tmp_path, "--num-layers", "3").returncode == 2


@pytest.mark.unit
@pytest.mark.parametrize("script", [*RUNS, "grpo.sh", "cluster.sh"])
def test_nothing_that_is_not_the_scripts_own_is_touched(script):
    text = (SCRIPTS / script).read_text()
    assert not re.search(r"pkill|killall|ray stop|rm -rf|/root|/home", text)
    assert subprocess.run(["bash", "-n", str(SCRIPTS / script)]).returncode == 0


@pytest.mark.unit
def test_the_rest_of_a_cluster_needs_the_heads_address(tmp_path):
    script = next(name for name in RUNS if "glm" in name)
    env = {key: value for key, value in ENV.items() if key != "HEAD"}
    done = subprocess.run([str(SCRIPTS / script), str(tmp_path)], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode != 0 and "set HEAD to the address of node 0" in done.stderr


@pytest.mark.system
def test_a_cluster_of_two_nodes_comes_and_goes(tmp_path):
    """Both nodes on this machine: the head waits for the other, runs the command, and both end."""
    (tmp_path / "command.py").write_text(
        "import os, ray\nray.init(logging_level='error')\n"
        "print('alive:', sum(node['Alive'] for node in ray.nodes()), os.environ['RAY_ADDRESS'])\n"
    )
    text = f'set -euo pipefail\ncd {SCRIPTS.parent}\nNODES=2\n. scripts/cluster.sh\nlaunch "$1"\n'
    bin = Path(sys.executable).parent
    head = ray.util.get_node_ip_address()
    env = {**ENV, "PATH": f"{bin}:{os.environ['PATH']}", "HEAD": head, "GPUS_PER_NODE": "0"}
    env |= {
        "RAY_PORT": "20379",
        "RAY_WAIT_SECONDS": "150",
        "RAY_AUTH_TOKEN": "0" * 64,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    }
    nodes = [
        subprocess.Popen(
            ["bash", "-c", text, "launch", str(tmp_path / "command.py")],
            env={**env, "NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        out, _ = nodes[0].communicate(timeout=200)
        assert f"alive: 2 {head}:20379" in out, out[-2000:]
        assert nodes[0].returncode == 0
        nodes[1].communicate(timeout=100)
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
                node.wait()
