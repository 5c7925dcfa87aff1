"""--sglang-config: what it makes of a file, and every way in which a file can be wrong."""

from pathlib import Path

import pytest
import yaml

from slime.utils.checkpoint_files import quantization_config
from slime.utils.served_models import EngineSpec, engine_args, model_url, policy_model

pytestmark = pytest.mark.unit


@pytest.fixture
def file(setup):
    def write(*models) -> tuple[str, str]:
        return "--sglang-config", setup.write("engines.yaml", yaml.safe_dump({"sglang": list(models)}))

    return write


def group(num_gpus=1, worker_type="regular", **keys):
    return {"worker_type": worker_type, "num_gpus": num_gpus, **keys}


POLICY = {"name": "actor", "server_groups": [group(2)]}


def test_without_a_file_the_policy_is_served_alone(setup):
    args = setup.load()
    (model,) = args.served_models
    assert (model.model_path, model.update_weights, model.num_gpus) == (setup.model, True, 2)
    assert [spec.slots for spec in model.engines()] == [range(0, 1), range(1, 2)]


def test_models_and_groups(setup, file):
    frozen = setup.write_model("judge")
    judge = {"name": "judge", "model_path": frozen, "server_groups": [group(1)]}
    policy = {
        "name": "actor",
        "server_groups": [group(2, overrides={"max-running-requests": 4, "dtype": "float32"}), group(1)],
    }
    args = setup.load(*file(judge, policy), colocate=False)
    actor, judge = args.served_models  # the policy's slots come first
    assert policy_model(args) is actor and args.rollout_num_gpus == 4
    assert (actor.update_weights, judge.update_weights) == (True, False)
    assert [list(spec.slots) for model in (actor, judge) for spec in model.engines()] == [[0], [1], [2], [3]]
    first, _, third = (engine_args(args, actor, spec) for spec in actor.engines())
    assert (first.sglang_max_running_requests, first.sglang_dtype) == (4, "float32")
    assert (third.sglang_max_running_requests, third.sglang_dtype) == (None, None)
    assert engine_args(args, judge, judge.engines()[0]).hf_checkpoint == frozen


def test_colocated_policy_shares_gpus_and_frozen_models_have_their_own(setup, file):
    from slime.ray.placement_group import total_slots

    frozen = {"name": "ref", "update_weights": False, "server_groups": [group(1)]}
    policy = {"name": "actor", "server_groups": [group(1), group(1, "placeholder")]}
    args = setup.load(*file(policy, frozen))
    assert args.rollout_num_gpus == total_slots(args) == 3
    actor, ref = args.served_models
    assert [spec.slots for spec in actor.engines()] == [range(0, 1)] and actor.num_answering() == 1
    assert [spec.slots for spec in ref.engines()] == [range(2, 3)]
    assert engine_args(args, actor, actor.engines()[0]).offload_rollout
    assert not engine_args(args, ref, ref.engines()[0]).offload_rollout
    assert "but under --colocate it shares the trainers' 2" in setup.errors(
        *file({**POLICY, "server_groups": [group(1)]})
    )


def test_prefill_servers(setup):
    flags = ["--rollout-engine", "sglang", "--rollout-num-gpus", "4", "--prefill-num-servers", "1"]
    message = setup.errors(*flags, colocate=False)
    assert "--prefill-num-servers" in message and "sglang-router" in message
    assert "mooncake" in message and "not installed" in message
    assert "must leave servers that decode: there are 2" in setup.errors(
        "--prefill-num-servers", "2", "--rollout-num-gpus", "2", colocate=False
    )
    assert "need SGLang" in setup.errors("--prefill-num-servers", "1", "--rollout-num-gpus", "2", colocate=False)


def test_engines_of_a_split_model_know_their_half(setup):
    from argparse import Namespace

    from slime.utils.served_models import ServedModel, ServerGroup

    model = ServedModel("default", "/m", True, (ServerGroup("prefill", 2, 2), ServerGroup("decode", 4, 2)))
    args = Namespace(served_models=(model,))
    assert model.is_disaggregated and model.num_answering() == 2
    modes = [engine_args(args, model, spec).sglang_disaggregation_mode for spec in model.engines()]
    assert modes == ["prefill", "decode", "decode"]
    assert model.engines()[2] == EngineSpec("decode", range(4, 6), {})


def test_model_url():
    from argparse import Namespace

    args = Namespace(sglang_model_routers={"judge": ("127.0.0.1", 81), "six": ("::1", 82)})
    assert model_url(args, "judge") == "http://127.0.0.1:81" and model_url(args, "six") == "http://[::1]:82"
    with pytest.raises(KeyError, match=r"no model 'x' is served.*judge, six"):
        model_url(args, "x")


REFUSED = {
    "no list": ({"name": "a"}, "has no list of server_groups"),
    "name": ({"name": "a b", "server_groups": [group()]}, "name must be letters"),
    "reserved": ({"name": "engine", "server_groups": [group()]}, "name must be letters"),
    "key": (
        {"name": "a", "server_group": [group()]},
        "unknown key server_group\n    fix: did you mean server_groups?",
    ),
    "group key": ({"name": "a", "server_groups": [group(gpus=1)]}, "unknown key gpus"),
    "type": ({"name": "a", "server_groups": [group(1, "prefil")]}, "worker_type must be one of"),
    "count": ({"name": "a", "server_groups": [group(0)]}, "num_gpus must be a whole number above 0, got 0"),
    "frozen": ({"name": "a", "update_weights": False, "server_groups": [group()]}, "no model takes the trainer's"),
    "half": ({"name": "a", "server_groups": [group(1, "decode")]}, "prefill and decode come as a pair"),
    "override": ({"name": "a", "server_groups": [group(overrides={"page_size": "x"})]}, "must be a whole number"),
    "owned": ({"name": "a", "server_groups": [group(overrides={"tp_size": 2})]}, "slime sets this itself"),
    "embedded": ({"name": "a", "server_groups": [group(2, num_gpus_per_engine=2)]}, "runs on one device"),
    "uneven": (
        {"name": "a", "server_groups": [group(3, num_gpus_per_engine=2)]},
        "must be a multiple of num_gpus_per",
    ),
    "path": ({"name": "a", "model_path": "/nowhere", "server_groups": [group()]}, "is not a directory"),
    "update": ({"name": "a", "update_weights": "no", "server_groups": [group()]}, "must be true or false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(setup, file, name):
    model, rule = REFUSED[name]
    message = setup.errors(*file(model), colocate=False)
    assert "--sglang-config" in message and rule in message


def test_refused_as_a_whole(setup, file, one_error):
    twice = file(POLICY, {**POLICY, "update_weights": False})
    assert "two models are called actor" in one_error(*twice, colocate=False)
    both = file(POLICY, {**POLICY, "name": "other"})
    assert "actor and other would both take the trainer's weights" in one_error(*both, colocate=False)
    assert "is not the 2 GPUs" in one_error(*file(POLICY), "--rollout-num-gpus", "4", colocate=False)
    assert "excludes --prefill-num-servers" in one_error(*file(POLICY), "--prefill-num-servers", "1", colocate=False)
    missing = str(Path(setup.root) / "none.yaml")
    assert "cannot be read" in one_error("--sglang-config", missing, colocate=False)
    wrong = setup.write("wrong.yaml", "models: []")
    assert "must hold one key, sglang" in one_error("--sglang-config", wrong, colocate=False)


def test_a_frozen_model_can_be_the_teacher(setup, file):
    teacher = {"name": "teacher", "model_path": setup.write_model("teacher"), "server_groups": [group(1)]}
    flags = (*file(POLICY, teacher), "--use-opd", "--opd-teacher-url")
    args = setup.load(*flags, "teacher", colocate=False)
    assert args.opd_type == "sglang" and args.rollout_sample_hook_path == ["slime.rollout.teacher.teacher_log_probs"]
    assert "be the name of a frozen model" in setup.errors(*flags, "actor", colocate=False)
    teacher["model_path"] = setup.write_model("other", vocab_size=5)
    wide = setup.write_model("wide", vocab_size=9)
    flags = (*file({**POLICY, "model_path": wide, "update_weights": True}, teacher), "--use-opd")
    message = setup.errors(*flags, "--opd-teacher-url", "teacher", "--hf-checkpoint", wide, colocate=False)
    assert "its vocabulary of 5 is not the 9" in message


def test_fp8_engines(setup, file):
    fp8 = setup.write_model("fp8", quantization_config=quantization_config((128, 128), []))
    policy = {**POLICY, "model_path": fp8, "update_weights": True}
    assert "has FP8 weights, which need SGLang" in setup.errors(*file(policy), colocate=False)
    message = setup.errors("--rollout-engine", "sglang", "--hf-checkpoint", fp8)
    assert "FP8 weights, which cannot be trained" in message or "SGLang is not installed" in message
    odd = setup.write_model("awq", quantization_config={"quant_method": "awq"})
    policy["model_path"] = odd
    assert "awq" in setup.errors(*file(policy), colocate=False)
