"""Every way to replace the served weights, with proof that no token is computed from old KV afterwards."""

from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file

from slime.engine.weight_groups import join_group
from slime.weight_sync.disk_format import Manifest, VersionWriter, as_bytes
from tests.conformance.requests import LONG_PROMPT, TOLERANCE, bucket, encode, error_to, start_long
from tests.conformance.test_control import push_all

pytestmark = pytest.mark.integration

SAMPLED = {"max_new_tokens": 12, "ignore_eos": True}


def is_from(model, reply, prompt=LONG_PROMPT, start: int = 0) -> bool:
    """Whether the log-probs of a reply, from token `start` on, are those of `model`."""
    return error_to(model, prompt, reply, start=start) <= TOLERANCE


def check_fresh(server, other_model, version: str) -> None:
    """The prompt was cached with old weights; the answer must be that of the new ones."""
    reply = server.generate(LONG_PROMPT, **SAMPLED)
    assert is_from(other_model, reply)
    assert reply["meta_info"]["cached_tokens"] == 0
    assert reply["meta_info"]["weight_version"] == version == server.ok("/get_weight_version")["weight_version"]
    spans = reply["meta_info"].get("weight_versions")
    assert spans in (None, [{"version": version, "start": 0, "end": 12}])  # None before SGLang 0.5.18
    again = server.generate(LONG_PROMPT, **SAMPLED)
    assert is_from(other_model, again) and again["meta_info"]["cached_tokens"] > 0


@pytest.mark.parametrize("flush", [True, False])
def test_plain_tensors_by_value(server, other_weights, other_model, flush):
    assert not is_from(other_model, server.generate(LONG_PROMPT, **SAMPLED))
    push_all(server, other_weights, "1", flush_cache=flush)
    check_fresh(server, other_model, "1")


@pytest.mark.parametrize("paused", [True, False])
def test_flattened_buckets_in_shared_memory(server, other_weights, other_model, paused):
    """As a colocated trainer sends them: aborted, flushed, several buckets, no flush with each."""
    server.generate(LONG_PROMPT, **SAMPLED)
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        if paused:
            server.ok("/pause_generation", {"mode": "abort"})
            server.ok("/flush_cache", {})
        server.ok("/begin_weight_update", {})
        names = sorted(other_weights)
        for part in (names[:9], names[9:]):
            tensors = {name: other_weights[name] for name in part}
            flat = torch.empty(sum(t.numel() for t in tensors.values())).share_memory_()
            payload = encode(bucket(tensors, flat), ForkingPickler)
            body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket"}
            server.ok("/update_weights_from_tensor", {**body, "weight_version": "2", "flush_cache": False})
        server.ok("/end_weight_update", {})
        server.ok("/continue_generation", {})
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    check_fresh(server, other_model, "2")


@pytest.mark.parametrize("flush", [True, False])
def test_disk(server, other_model_dir, other_model, flush):
    server.generate(LONG_PROMPT, **SAMPLED)
    body = {"model_path": other_model_dir, "weight_version": "5", "flush_cache": flush}
    server.ok("/update_weights_from_disk", body)
    check_fresh(server, other_model, "5")
    assert server.ok("/get_model_info")["model_path"] == other_model_dir
    server.error("/update_weights_from_disk", {"model_path": "/no/such/dir"})
    assert is_from(other_model, server.generate(LONG_PROMPT, **SAMPLED))


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_published_versions_are_pulled(
    server, tiny_model_dir, other_weights, other_model, hf_model, tmp_path, encoding
):
    """A full version and a delta at once, then a delta alone."""
    first = load_file(f"{tiny_model_dir}/model.safetensors")
    places = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path / "shared")}

    def publish(version, base, old, new):
        manifest = Manifest(version, "run", base, encoding, "xxh3-128")
        writer = VersionWriter(tmp_path / "shared", manifest, tiny_model_dir)
        if base is None:
            writer.add_full(new)
        else:
            writer.add_delta(*({name: as_bytes(t) for name, t in weights.items()} for weights in (old, new)))
        writer.publish()

    def update(version):
        path = server.ok("/pull_weights", {**places, "target_version": version})["model_path"]
        server.ok("/update_weights_from_disk", {"model_path": path, "weight_version": str(version)})

    server.generate(LONG_PROMPT, **SAMPLED)
    publish(3, None, None, first)
    publish(4, 3, first, other_weights)
    update(4)
    check_fresh(server, other_model, "4")
    publish(5, 4, other_weights, first)
    update(5)
    check_fresh(server, hf_model, "5")
    assert "weight_v000006 is missing" in server.error("/pull_weights", {**places, "target_version": 6}, status=409)
    server.error("/pull_weights", places)


@pytest.fixture
def sync_group(server):
    """A gloo group with the server, which has an update open."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    fields = {"master_address": "127.0.0.1", "master_port": port, "group_name": "sync", "backend": "gloo"}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(server.ok, "/init_weights_update_group", {**fields, "rank_offset": 1, "world_size": 2})
        group = join_group("127.0.0.1", port, 0, 2, "sync", "gloo")
        joined.result(60)
        server.ok("/begin_weight_update", {})
        yield group
        server.request("/end_weight_update", {})
        left = pool.submit(server.ok, "/destroy_weights_update_group", {"group_name": "sync"})
        dist.destroy_process_group(group)
        left.result(60)
    server.error("/destroy_weights_update_group", {"group_name": "sync"})


def announcement(weights, names, **more):
    shapes = [list(weights[name].shape) for name in names]
    body = {"group_name": "sync", "weight_version": "6", "flush_cache": False, "names": names, "shapes": shapes}
    return body | {"dtypes": [str(weights[name].dtype).removeprefix("torch.") for name in names], **more}


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_distributed_over_gloo(server, sync_group, other_weights, other_model, load_format):
    server.generate(LONG_PROMPT, **SAMPLED)
    names = sorted(other_weights)
    # Engines cast: a bucket may hold several dtypes.
    mixed = other_weights | {names[0]: other_weights[names[0]].double()}
    with ThreadPoolExecutor(1) as pool:
        for part in (names[:9], names[9:]):
            body = announcement(mixed, part, load_format=load_format)
            updated = pool.submit(server.ok, "/update_weights_from_distributed", body)
            tensors = [mixed[name] for name in part]
            if load_format:
                tensors = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])]
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=sync_group)
            updated.result(60)
    server.ok("/end_weight_update", {})
    check_fresh(server, other_model, "6")


def test_a_bucket_without_tensors_is_refused(server, sync_group, hf_model):
    server.error("/update_weights_from_distributed", announcement({}, [], load_format="flattened_bucket"))
    server.ok("/end_weight_update", {})
    assert is_from(hf_model, server.generate(LONG_PROMPT, **SAMPLED))


def test_an_update_needs_its_session(server, other_weights, tiny_model_dir):
    body = {"serialized_named_tensors": [encode(list(other_weights.items()))]}
    assert "begin_weight_update" in server.error("/update_weights_from_tensor", body)
    distributed = {"names": [], "dtypes": [], "shapes": [], "group_name": "none"}
    assert "begin_weight_update" in server.error("/update_weights_from_distributed", distributed)
    assert "begin_weight_update" in server.error("/end_weight_update", {})
    server.ok("/begin_weight_update", {})
    server.ok("/begin_weight_update", {})  # a lost trainer may have left one open
    server.ok("/end_weight_update", {})
    server.error("/end_weight_update", {})


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_in_mid_request(server, background, other_weights, other_model, mode, flush):
    """Two version spans. Retracted: all after the update is the new weights'. In place: old KV stays, for it alone."""
    first = start_long(server, background, "first")
    server.ok("/pause_generation", {"mode": mode})
    late = background.generate(LONG_PROMPT, **SAMPLED)
    body = {"serialized_named_tensors": [encode(list(other_weights.items()))], "weight_version": "7"}
    server.ok("/begin_weight_update", {})
    status, refusal = server.request("/update_weights_from_tensor", {**body, "flush_cache": flush})
    server.ok("/end_weight_update", {})
    server.ok("/continue_generation", {})
    reply = first.result(60)
    if status == 400:  # releases that would compute retracted requests from old KV
        assert mode == "retract" and "pause with mode abort" in refusal["error"]["message"]
        return
    assert status == 200, refusal
    assert len(reply["output_ids"]) == 400 and reply["meta_info"]["weight_version"] == "7"
    spans = reply["meta_info"].get("weight_versions")
    if spans is not None:
        old, new = spans
        assert (old["version"], old["start"], new["version"], new["end"]) == ("default", 0, "7", 400)
        assert 0 < old["end"] == new["start"] < 400
        assert is_from(other_model, reply, start=new["start"]) == (mode == "retract")
    for later in (late.result(30), server.generate(LONG_PROMPT, **SAMPLED)):
        assert is_from(other_model, later)


def test_checker(server, other_weights, tiny_model_dir):
    status, reply = server.request("/weights_checker", {"action": "checksum"})
    if status == 400 and "CUDA" in str(reply):
        pytest.skip("this release of SGLang has no checksums on CPU")

    def checksums():
        reply = server.ok("/weights_checker", {"action": "checksum"})
        return [rank["checksums"] for rank in reply["ranks"]]

    before = checksums()
    assert len(before) == 1 and len(before[0]) > 10
    server.ok("/weights_checker", {"action": "snapshot"})
    server.ok("/weights_checker", {"action": "compare"})
    server.ok("/weights_checker", {"action": "reset_tensors"})
    server.error("/weights_checker", {"action": "compare"})
    assert "pushed" in server.error("/generate", {"input_ids": [5]}, status=503)
    push_all(server, other_weights)
    server.error("/weights_checker", {"action": "compare"})
    assert checksums() != before
    server.ok("/update_weights_from_disk", {"model_path": tiny_model_dir, "weight_version": "default"})
    server.ok("/weights_checker", {"action": "compare"})
    assert checksums() == before
    server.error("/weights_checker", {"action": "guess"})


@pytest.mark.parametrize(
    "payload",
    ["%%%", encode("nonsense"), encode([("model.norm.weight", torch.zeros(5))]), encode([("nope", torch.zeros(64))])],
    ids=["no base64", "no tensors", "wrong shape", "unknown name"],
)
def test_bad_payloads_change_nothing(server, hf_model, payload):
    server.ok("/begin_weight_update", {})
    status, _ = server.request("/update_weights_from_tensor", {"serialized_named_tensors": [payload]})
    assert status >= 400 or server.kind == "sglang"
    server.ok("/end_weight_update", {})
    assert is_from(hf_model, server.generate(LONG_PROMPT, **SAMPLED))
