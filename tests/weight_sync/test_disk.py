"""Versions on disk: written, pulled, damaged, repaired, and served by a real engine."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.weight_sync.buckets import TensorSpec
from slime.weight_sync.disk import DiskPublisher
from slime.weight_sync.disk_format import INDEX, Manifest, version_dir
from slime.weight_sync.disk_pull import PullError, pull
from tests.backends.trainers import parameters_of, run_world, train_rollout
from tests.engine.server_process import EngineServer
from tests.weight_sync.test_transports import PROMPT, generate, make_local_trainer, reference_log_probs


def note_call(args, version_dir, rollout_engines):
    """`--custom-update-weight-post-write-path` of a test."""
    assert Path(version_dir).is_dir()
    with open(Path(args.update_weight_disk_dir) / "calls", "a") as file:
        file.write(f"{Path(version_dir).name} {len(rollout_engines)}\n")


class Weights:
    """A source of three tensors of two dtypes, which the test changes."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "a": torch.randn(33, 7, generator=generator),
            "b": torch.randn(5, generator=generator).bfloat16(),
            "c": torch.randn(64, 64, generator=generator),
        }

    def tensor_specs(self):
        return [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in self.tensors.items()]

    def gather(self, specs, out):
        for spec, target in zip(specs, out, strict=True):
            target.copy_(self.tensors[spec.name])


@pytest.fixture
def single_rank(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_publisher(tmp_path, **changes):
    origin = tmp_path / "origin"
    origin.mkdir(exist_ok=True)
    (origin / "config.json").write_text("{}")
    (origin / "old.safetensors").write_text("not copied")
    values = {
        "update_weight_mode": "delta",
        "update_weight_disk_dir": str(tmp_path / "shared"),
        "update_weight_disk_keep_files": False,
        "update_weight_buffer_size": 1000,
        "update_weight_delta_encoding": "xor",
        "update_weight_delta_checksum": "xxh3-128",
    }
    return DiskPublisher(Namespace(**{**values, **changes}), Weights(), 0, torch.device("cpu"), str(origin))


def pulled(tmp_path, version, local="local"):
    path = pull(tmp_path / local, tmp_path / "shared", version)
    files = set(json.loads((path / INDEX).read_text())["weight_map"].values())
    return {name: tensor for file in files for name, tensor in load_file(path / file).items()}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.unit
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_deltas_lead_to_the_trainers_bytes(single_rank, tmp_path, encoding, checksum):
    publisher = make_publisher(tmp_path, update_weight_delta_encoding=encoding, update_weight_delta_checksum=checksum)
    weights = publisher.source.tensors
    sizes = [publisher.publish(1)]
    assert_same(pulled(tmp_path, 1), weights)
    assert (version_dir(tmp_path / "shared", 1) / "config.json").exists()
    assert not (version_dir(tmp_path / "shared", 1) / "old.safetensors").exists()
    weights["b"] += 1
    sizes.append(publisher.publish(2))
    weights["a"][0] *= 2
    weights["b"][0] = float("nan")
    sizes.append(publisher.publish(3))
    assert publisher.publish(3) == 0  # there already
    manifest = Manifest.read(version_dir(tmp_path / "shared", 3))
    assert manifest.base_version == 2 and manifest.tensors.keys() == {"a", "b"}
    assert max(sizes[1:]) < sizes[0] / 4
    for local in ("local", "new host"):  # from version 1, and from nothing
        path = pull(tmp_path / local, tmp_path / "shared", 3)
        raw = pulled(tmp_path, 3, local)
        assert torch.equal(raw["a"], weights["a"]) and torch.equal(raw["c"], weights["c"])
        assert torch.equal(raw["b"].view(torch.int16), weights["b"].view(torch.int16))
        assert json.loads((path.parent / "state.json").read_text())["version"] == 3


@pytest.mark.unit
def test_damage_is_found_and_a_full_version_repairs_it(single_rank, tmp_path):
    publisher = make_publisher(tmp_path)
    weights = publisher.source.tensors

    def next_version(version):
        weights["a"] += 1
        publisher.publish(version)
        return version_dir(tmp_path / "shared", version)

    next_version(1)
    pulled(tmp_path, 1)
    damages = {
        "bytes changed": lambda d: flip(d / "delta-00001.safetensors"),
        "file cut": lambda d: (d / "delta-00001.safetensors").write_bytes(b"1234567890"),
        "file missing": lambda d: (d / "delta-00001.safetensors").unlink(),
        "manifest cut": lambda d: (d / "slime_weights.json").write_text("{"),
        "all missing": lambda d: d.rename(d.with_name("elsewhere")),
    }
    for version, damage in enumerate(damages.values(), start=2):
        damage(next_version(version))
        with pytest.raises(PullError):
            pull(tmp_path / "local", tmp_path / "shared", version)
        publisher.publish(version, full=True)
        assert_same(pulled(tmp_path, version), weights)
    # The host's own checkpoint is damaged: the next delta does not fit, and a chain from the full version does.
    checkpoint = tmp_path / "local" / "checkpoint"
    file = json.loads((checkpoint / INDEX).read_text())["weight_map"]["a"]
    flip(checkpoint / file)
    next_version(7)
    with pytest.raises(PullError, match="a differs"):
        pull(tmp_path / "local", tmp_path / "shared", 7)
    assert_same(pulled(tmp_path, 7), weights)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.unit
def test_another_runs_versions_are_not_mixed(single_rank, tmp_path):
    first = make_publisher(tmp_path)
    first.publish(1)
    pulled(tmp_path, 1)
    second = make_publisher(tmp_path)
    second.source.tensors["a"] += 5
    second.publish(1)
    assert_same(pulled(tmp_path, 1), second.source.tensors)


@pytest.mark.unit
def test_old_versions_go_and_deltas_do_not_pile_up(single_rank, tmp_path):
    publisher = make_publisher(tmp_path)
    for version in range(1, 12):
        for tensor in publisher.source.tensors.values():
            tensor.copy_(torch.randn_like(tensor.float()))
        publisher.publish(version)
        publisher.remove_old()
        assert_same(pulled(tmp_path, version), publisher.source.tensors)
    names = sorted(p.name for p in (tmp_path / "shared").iterdir())
    assert len(names) <= 3 and names[-1] == "weight_v000011"
    full = make_publisher(tmp_path, update_weight_mode="full", update_weight_disk_keep_files=True)
    full.root = tmp_path / "kept"
    for version in (1, 2):
        full.publish(version)
        full.remove_old()
    assert sorted(p.name for p in full.root.iterdir()) == ["weight_v000001", "weight_v000002"]


def update_through_disk(rank, world_size, port, model_dir, urls, root):
    """Both modes between two trainer ranks and two engines; a delta is lost on the way."""
    out = {}
    shared = Path(root) / "shared"
    hook = ("--custom-update-weight-post-write-path", "tests.weight_sync.test_disk.note_call")
    flags = ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(shared), *hook]
    trainer = make_local_trainer(rank, world_size, port, model_dir, *flags, colocate=False)
    for mode in ("full", "delta"):
        trainer.args.update_weight_mode = mode
        trainer.args.update_weight_disk_dir = str(shared / mode)
        trainer.args.update_weight_local_checkpoint_dir = f"{root}/local" if mode == "delta" else None
        trainer._connections = None
        trainer.set_rollout_engines(urls, [[0], [1]])
        written = []
        for step in range(4):
            train_rollout(trainer, trainer.optimizer.steps_done)
            if step == 2 and mode == "delta" and rank == 0:
                publish = trainer._connections._publisher._write

                def lose(version, base, publish=publish):
                    written = publish(version, base)
                    if base is not None:
                        (version_dir(shared / "delta", version) / "delta-00001.safetensors").unlink()
                    return written

                trainer._connections._publisher._write = lose
            metrics = trainer.update_weights()
            torch.distributed.barrier()
            written.append(metrics["perf/update_weights_bytes"] if rank == 0 else None)
        trainer.check_weights()
        torch.distributed.barrier()
        out[mode] = parameters_of(trainer), [generate(url) for url in urls], written
        torch.distributed.barrier()
        # An engine that comes back gets the version that is served, without a new one being written.
        trainer.sync_new_engines(urls[:1], [[0]])
        out[mode] += (generate(urls[0])["meta_info"]["weight_version"], trainer.updater.version)
    trainer.dispose()
    return out


@pytest.mark.integration
def test_engines_serve_what_was_published(tiny_model_dir, tmp_path):
    servers = [EngineServer(tiny_model_dir, make(tmp_path / f"engine-{i}")) for i in range(2)]
    try:
        urls = [server.wait().url for server in servers]
        result, _ = run_world(update_through_disk, 2, tiny_model_dir, urls, str(tmp_path))
    finally:
        for server in servers:
            server.stop()
    for expected_version, (parameters, replies, written, synced, version) in zip((4, 8), result.values(), strict=True):
        assert synced == str(expected_version) and version == expected_version
        for reply in replies:
            ids, meta = PROMPT + reply["output_ids"], reply["meta_info"]
            served = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]], dtype=torch.float64)
            expected = reference_log_probs(tiny_model_dir, parameters, ids)[-len(served) :]
            assert (served - expected).abs().max() < 1e-5 and meta["weight_version"] == synced
        assert min(written) > 0
    size = sum(p.numel() * 4 for p in result["full"][0].values())
    full, delta = result["full"][2], result["delta"][2]
    assert all(size < n < 1.1 * size for n in full)
    assert delta[0] > size and delta[1] < size < delta[2]  # the third was lost and written again in full
    calls = (tmp_path / "shared" / "full" / "calls").read_text().splitlines()
    assert calls[:2] == ["weight_v000001 2", "weight_v000002 2"]
    assert [p.name for p in sorted((tmp_path / "shared" / "full").glob("weight_*"))] == ["weight_v000004"]


def make(path):
    path.mkdir()
    return path
