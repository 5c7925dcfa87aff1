"""Every way to replace the served weights, over HTTP, with proof that no old KV is used afterwards."""

import base64
import pickle
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slime.engine.weight_groups import join_group
from tests.engine.test_control import wait_tokens
from tests.engine.test_generate import output_logprobs, reference_logprobs
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.integration

PROMPT = list(range(10, 50))
SAMPLED = {"max_new_tokens": 12, "sampling_seed": 1, "ignore_eos": True}


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory) -> str:
    """The tiny model with other weights."""
    path = str(tmp_path_factory.mktemp("other-model"))
    save_tiny_model(path, seed=1)
    return path


@pytest.fixture(scope="session")
def other_weights(other_model_dir) -> dict[str, torch.Tensor]:
    return load_file(f"{other_model_dir}/model.safetensors")


@pytest.fixture(scope="session")
def other_model(other_model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(other_model_dir, attn_implementation="eager").eval()


def encode(payload, pickler=pickle) -> str:
    return base64.b64encode(bytes(pickler.dumps(payload))).decode()


def bucket(named: dict[str, torch.Tensor]) -> dict:
    metadata, offset = [], 0
    for name, tensor in named.items():
        end = offset + tensor.numel()
        meta = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "start_idx": offset, "end_idx": end}
        metadata.append(SimpleNamespace(**meta, numel=tensor.numel()))
        offset = end
    return {"flattened_tensor": torch.cat([t.reshape(-1) for t in named.values()]), "metadata": metadata}


def push(server, payload: str, **fields):
    server.ok("/begin_weight_update", {})
    server.ok("/update_weights_from_tensor", {"serialized_named_tensors": [payload], **fields})
    server.ok("/end_weight_update", {})


def is_from(model, reply, prompt=PROMPT) -> bool:
    """Whether the log-probs of a reply are those of `model`."""
    expected = reference_logprobs(model, prompt + reply["output_ids"])[len(prompt) - 1 :]
    return (output_logprobs(reply) - expected).abs().max().item() <= 1e-5


def check_fresh(server, other_model, version: str) -> None:
    """The prompt was cached with old weights; the answer must be that of the new ones."""
    reply = server.generate(PROMPT, **SAMPLED)
    assert is_from(other_model, reply)
    assert reply["meta_info"]["cached_tokens"] == 0
    assert reply["meta_info"]["weight_version"] == version
    assert reply["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 12}]


@pytest.mark.parametrize("flush", [True, False])
def test_plain_tensors_by_value(server, other_weights, other_model, flush):
    assert not is_from(other_model, server.generate(PROMPT, **SAMPLED))
    push(server, encode(list(other_weights.items())), weight_version="1", flush_cache=flush)
    check_fresh(server, other_model, "1")


def test_flattened_buckets_in_shared_memory(server, other_weights, other_model):
    server.generate(PROMPT, **SAMPLED)
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        names = sorted(other_weights)
        for part in (names[:9], names[9:]):
            content = bucket({name: other_weights[name] for name in part})
            payload = encode(content, ForkingPickler)
            push(server, payload, load_format="flattened_bucket", weight_version="2", flush_cache=False)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    check_fresh(server, other_model, "2")


def test_other_dtypes_are_cast(server, other_weights):
    half = {name: tensor.to(torch.bfloat16) for name, tensor in other_weights.items()}
    push(server, encode(bucket(half)), load_format="flattened_bucket", weight_version="3")
    server.ok("/weights_checker", {"action": "snapshot"})
    back = {name: tensor.float() for name, tensor in half.items()}
    push(server, encode(list(back.items())), weight_version="4")
    server.ok("/weights_checker", {"action": "compare"})


def test_disk(server, other_model_dir, other_model, tmp_path):
    server.generate(PROMPT, **SAMPLED)
    body = {"model_path": other_model_dir, "weight_version": "5", "flush_cache": False}
    server.ok("/update_weights_from_disk", body)
    check_fresh(server, other_model, "5")
    assert server.ok("/get_model_info")["model_path"] == other_model_dir
    for path in ("/no/such/dir", str(tmp_path), None):
        assert "safetensors" in server.error("/update_weights_from_disk", {"model_path": path})
    save_tiny_model(str(tmp_path), hidden_size=32)
    assert "shape" in server.error("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert is_from(other_model, server.generate(PROMPT, **SAMPLED))


def test_distributed_over_gloo(server, other_weights, other_model):
    server.generate(PROMPT, **SAMPLED)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    fields = {"master_address": "127.0.0.1", "master_port": port, "group_name": "sync", "backend": "gloo"}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(server.ok, "/init_weights_update_group", {**fields, "rank_offset": 1, "world_size": 2})
        group = join_group("127.0.0.1", port, 0, 2, "sync", "gloo")
        joined.result(30)
        body = {"group_name": "sync", "weight_version": "6", "flush_cache": False}
        server.ok("/begin_weight_update", {})
        body["names"] = sorted(other_weights)
        body["dtypes"] = ["float32"] * len(other_weights)
        body["shapes"] = [list(other_weights[name].shape) for name in body["names"]]
        assert "no weight named" in server.error("/update_weights_from_distributed", {**body, "names": ["x"] * 24})
        assert "one length" in server.error("/update_weights_from_distributed", {**body, "names": ["x"]})
        updated = pool.submit(server.ok, "/update_weights_from_distributed", body)
        for name in body["names"]:
            dist.broadcast(other_weights[name], src=0, group=group)
        updated.result(30)
    check_fresh(server, other_model, "6")
    assert "exists already" in server.error(
        "/init_weights_update_group", {**fields, "rank_offset": 1, "world_size": 2}
    )
    server.ok("/end_weight_update", {})
    server.ok("/destroy_weights_update_group", {"group_name": "sync"})
    dist.destroy_process_group(group)
    assert "no group" in server.error("/destroy_weights_update_group", {"group_name": "sync"})
    server.ok("/begin_weight_update", {})
    assert "no group" in server.error("/update_weights_from_distributed", body)
    server.ok("/end_weight_update", {})
    assert "missing or bad field" in server.error("/init_weights_update_group", {"master_port": 1})
    assert "does not work" in server.error(
        "/init_weights_update_group", {**fields, "backend": "nccl", "rank_offset": 1, "world_size": 2}
    )


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_in_mid_request_gives_two_version_spans(server, background, other_weights, other_model, mode):
    first = background.generate(PROMPT, max_new_tokens=300, sampling_seed=4, ignore_eos=True)
    wait_tokens(server, 20)
    server.ok("/pause_generation", {"mode": mode})
    push(server, encode(list(other_weights.items())), weight_version="7", flush_cache=mode == "in_place")
    server.ok("/continue_generation", {})
    reply = first.result(30)
    old, new = reply["meta_info"]["weight_versions"]
    assert (old["version"], new["version"], new["end"]) == ("default", "7", 300)
    assert 20 <= old["end"] == new["start"] < 300 and old["start"] == 0
    assert reply["meta_info"]["weight_version"] == "7"
    tail, entries = PROMPT + reply["output_ids"][: new["start"]], reply["meta_info"]["output_token_logprobs"]
    rest = {"output_ids": reply["output_ids"][new["start"] :]}
    rest["meta_info"] = {"output_token_logprobs": entries[new["start"] :]}
    # Retracted: everything after the update is computed by the new weights alone. In place: old KV stays.
    assert is_from(other_model, rest, tail) == (mode == "retract")
    later = server.generate(PROMPT, **SAMPLED)
    assert is_from(other_model, later)
    # KV of mixed versions is never shared; that of the retracted request was computed again.
    assert (later["meta_info"]["cached_tokens"] > 0) == (mode == "retract")


def test_update_weight_version(server, background):
    held = background.generate([5, 6], max_new_tokens=450, ignore_eos=True)
    wait_tokens(server, 5)
    server.ok("/update_weight_version", {"new_version": "v9", "abort_all_requests": False})
    assert server.ok("/get_model_info")["weight_version"] == "v9" and not held.done()
    server.ok("/update_weight_version", {"new_version": "default"})
    assert held.result(30)["meta_info"]["finish_reason"]["type"] == "abort"
    assert "new_version" in server.error("/update_weight_version", {})


def test_checker(server, other_weights, tiny_model_dir):
    before = server.ok("/weights_checker", {"action": "checksum"})["ranks"]
    server.ok("/weights_checker", {"action": "snapshot"})
    server.ok("/weights_checker", {"action": "compare"})
    server.ok("/weights_checker", {"action": "reset_tensors"})
    assert "differ" in server.error("/weights_checker", {"action": "compare"})
    assert "until they are pushed" in server.error("/generate", {"input_ids": [5]}, status=503)
    push(server, encode(list(other_weights.items())[:3]), weight_version="8")
    assert "until they are pushed" in server.error("/generate", {"input_ids": [5]}, status=503)
    server.ok("/update_weights_from_disk", {"model_path": tiny_model_dir, "weight_version": "default"})
    server.ok("/weights_checker", {"action": "compare"})
    assert server.ok("/weights_checker", {"action": "checksum"})["ranks"] == before
    assert "action must be" in server.error("/weights_checker", {"action": "guess"})


class Evil:
    def __reduce__(self):
        return (print, ("this must never run",))


class EvilPath:
    def __reduce__(self):
        import os

        return (os.system, ("true",))


def test_bad_payloads(server, other_weights):
    name = "model.norm.weight"
    good = other_weights[name]
    cases = [
        ("%%%", None, "not base64"),
        (base64.b64encode(b"nonsense").decode(), None, "cannot be unpickled"),
        (encode([("x", Evil())]), None, "builtins.print, which is not allowed"),
        (encode([("x", EvilPath())]), None, "system, which is not allowed"),
        (encode(torch.nn.Linear), None, "not allowed"),
        (encode(5), None, "list of (name, tensor)"),
        (encode([("x", 1)]), None, "list of (name, tensor)"),
        (encode([("model.nope", good)]), None, "no weight named 'model.nope'"),
        (encode([(name, good[:5])]), None, "shape (5,) given, the model has (64,)"),
        (encode([(name, good), ("nope", good)]), None, "no weight named"),
        (encode([(name, good)]), "flattened_bucket", "flattened_tensor and metadata"),
        (encode({"flattened_tensor": good, "metadata": [SimpleNamespace(name=name)]}), "flattened_bucket", "metadata"),
        (encode([(name, good)]), "npz", "load_format"),
    ]
    before = server.ok("/weights_checker", {"action": "checksum"})["ranks"]
    server.ok("/begin_weight_update", {})
    for payload, load_format, message in cases:
        body = {"serialized_named_tensors": [payload], "load_format": load_format}
        assert message in server.error("/update_weights_from_tensor", body), message
    assert "payload of this engine's one rank" in server.error("/update_weights_from_tensor", {})
    short = bucket({name: good})
    short["metadata"][0].end_idx = 9999
    payload = [encode(short)]
    body = {"serialized_named_tensors": payload, "load_format": "flattened_bucket"}
    assert "do not make" in server.error("/update_weights_from_tensor", body)
    assert "flush_cache" in server.error("/update_weights_from_tensor", {**body, "flush_cache": "yes"})
    assert "weight_version" in server.error("/update_weights_from_tensor", {**body, "weight_version": [1]})
    assert server.ok("/weights_checker", {"action": "checksum"})["ranks"] == before
    server.ok("/begin_weight_update", {})  # a lost trainer may have left one open
    server.ok("/end_weight_update", {})
    assert "no weight update is open" in server.error("/end_weight_update", {})


def test_tied_head_may_be_sent_or_left_out(server, other_weights, other_model):
    named = [*other_weights.items(), ("lm_head.weight", other_weights["model.embed_tokens.weight"])]
    push(server, encode(named), weight_version="10")
    check_fresh(server, other_model, "10")
