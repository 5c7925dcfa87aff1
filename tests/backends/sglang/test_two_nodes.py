"""One tensor-parallel engine over two Ray nodes (of this machine), on CPU."""

import contextlib
import math
import multiprocessing

import pytest
import torch

from slime.arguments.parser import resolve
from slime.backends.sglang_utils.compat import installed_version
from slime.ray.server_process import http_json

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(installed_version() is None, reason="SGLang is not installed"),
]
PROMPT = [5, 6, 7, 8]


@contextlib.contextmanager
def two_nodes():
    """A Ray cluster of two nodes with one slot each, to which this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    from slime.ray.temp_dir import RayTempDir

    temp_dir = RayTempDir()
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**node, "include_dashboard": False, "temp_dir": str(temp_dir.path)},
    )
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
        temp_dir.remove()


def generate_over_two_nodes(model_dir: str, run_dir: str, results) -> None:
    """Start the engine, generate, end it; puts what it replied, its nodes and how its end was seen."""
    import ray

    from slime.ray.engines import create_engine
    from slime.ray.placement_group import create_placement_groups
    from slime.utils.served_models import one_group

    words = ["--hf-checkpoint", model_dir, "--device", "cpu", "--dtype", "float32", "--rollout-engine", "sglang"]
    words += ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--sglang-max-total-tokens", "2048"]
    args = resolve([*words, "--run-dir", run_dir])
    args.offload_rollout, args.debug_rollout_only = False, True
    args.served_models = one_group(model_dir, 2, 2)
    with two_nodes():
        placement = create_placement_groups(args)["rollout"]
        engine = create_engine(args, placement, args.served_models[0], 0)
        url = ray.get(engine.start.remote())
        params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        payload = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
        reply = http_json("POST", f"{url}/generate", payload)
        death = engine.wait_for_death.remote()
        ray.get(engine.shutdown.remote())
        results.put((reply, len(set(placement.nodes)), ray.get(death)))


def test_one_engine_over_two_nodes(tmp_path, tiny_model_dir):
    from transformers import AutoModelForCausalLM

    context = multiprocessing.get_context("spawn")  # the tests' own Ray may run in this process
    results = context.Queue()
    process = context.Process(target=generate_over_two_nodes, args=(tiny_model_dir, str(tmp_path), results))
    process.start()
    process.join(800)
    logs = {path.name: path.read_text()[-2000:] for path in (tmp_path / "logs").glob("*.log")}
    assert process.exitcode == 0, logs
    reply, nodes, death = results.get(timeout=10)
    assert nodes == 2 and death is None and set(logs) == {"engine-0.log", "engine-0-node-1.log"}
    tokens = PROMPT + reply["output_ids"]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for i, (logprob, token, _) in enumerate(reply["meta_info"]["output_token_logprobs"]):
        assert math.isclose(logprob, expected[len(PROMPT) + i - 1, token], abs_tol=1e-4)
