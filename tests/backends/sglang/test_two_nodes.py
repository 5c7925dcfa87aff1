"""One tensor-parallel engine over two Ray nodes (of this machine), on CPU."""

import math

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


@pytest.fixture
def two_nodes():
    import ray
    from ray.cluster_utils import Cluster

    from slime.ray.temp_dir import RayTempDir

    temp_dir = RayTempDir()
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    head = {**node, "include_dashboard": False, "temp_dir": str(temp_dir.path)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()
    temp_dir.remove()


def test_one_engine_over_two_nodes(two_nodes, tmp_path, tiny_model_dir):
    import ray
    from transformers import AutoModelForCausalLM

    from slime.ray.engines import create_engine
    from slime.ray.placement_group import create_placement_groups
    from slime.utils.served_models import one_group

    words = ["--hf-checkpoint", tiny_model_dir, "--device", "cpu", "--dtype", "float32", "--rollout-engine", "sglang"]
    words += ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--sglang-max-total-tokens", "2048"]
    args = resolve([*words, "--run-dir", str(tmp_path)])
    args.offload_rollout, args.debug_rollout_only = False, True
    args.served_models = one_group(tiny_model_dir, 2, 2)
    placement = create_placement_groups(args)["rollout"]
    assert len(set(placement.nodes)) == 2
    engine = create_engine(args, placement, args.served_models[0], 0)
    url = ray.get(engine.start.remote())
    assert {path.name for path in (tmp_path / "logs").glob("*.log")} == {"engine-0.log", "engine-0-node-1.log"}

    prompt = [5, 6, 7, 8]
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    reply = http_json(
        "POST", f"{url}/generate", {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    )
    tokens = prompt + reply["output_ids"]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for i, (logprob, token, _) in enumerate(reply["meta_info"]["output_token_logprobs"]):
        assert math.isclose(logprob, expected[len(prompt) + i - 1, token], abs_tol=1e-4)

    death = engine.wait_for_death.remote()
    ray.get(engine.shutdown.remote())
    assert ray.get(death) is None
