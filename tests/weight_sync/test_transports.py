"""Both transports between real trainer ranks and real engine servers."""

import json
import os
import signal
import urllib.request

import pytest
import torch

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.weight_sync.buckets import plan_buckets
from slime.weight_sync.engines import WeightSyncError
from tests.backends.trainers import make_trainer, parameters_of, run_world, train_rollout, trainer_args
from tests.engine.server_process import EngineServer

pytestmark = pytest.mark.integration

PROMPT = list(range(10, 40))
BUCKET = ("--update-weight-buffer-size", "40000")


@pytest.fixture(scope="module")
def servers(tiny_model_dir, tmp_path_factory):
    """Two engines; the last test kills the second."""
    started = [EngineServer(tiny_model_dir, tmp_path_factory.mktemp(f"engine-{i}")) for i in range(2)]
    try:
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.stop()


def generate(url):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 16, "ignore_eos": True},
        "return_logprob": True,
    }
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def make_local_trainer(rank, world_size, port, model_dir, *flags, **changes):
    trainer = make_trainer(
        FSDPTrainRayActor, trainer_args(model_dir, *BUCKET, *flags, **changes), rank, world_size, port
    )
    trainer.node_address = lambda: "127.0.0.1"
    return trainer


def update_over_both_transports(rank, world_size, port, model_dir, urls, root):
    """Train, push, generate; the engines' answers and the weights that they should come from, per transport."""
    out = {}
    trainer = make_local_trainer(rank, world_size, port, model_dir, "--save", root)
    for transport, colocate in (("tensor", True), ("distributed", False)):
        trainer.args.colocate = colocate
        trainer.set_rollout_engines(urls, [[0], [1]])
        for _ in range(2):  # the second finds caches of the first
            train_rollout(trainer, trainer.optimizer.steps_done)
            metrics = trainer.update_weights()
            torch.distributed.barrier()
            replies = [generate(url) for url in urls]
            torch.distributed.barrier()
        trainer.check_weights()
        torch.distributed.barrier()
        replies += [generate(url) for url in urls]
        out[transport] = (
            parameters_of(trainer),
            replies,
            metrics,
            len(trainer.updater.buckets),
            trainer.updater.version,
        )
    trainer.save_model(0)
    resumed = make_local_trainer(rank, world_size, port, model_dir, "--load", root)
    resumed.set_rollout_engines(urls, [[0], [1]])
    out["resumed version"] = resumed.updater.version
    trainer.dispose()
    return out


def reference_log_probs(model_dir, parameters, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_engines_serve_the_new_weights(tiny_model_dir, servers, tmp_path):
    urls = [server.url for server in servers]
    results = run_world(update_over_both_transports, 2, tiny_model_dir, urls, str(tmp_path))
    for transport, version in (("tensor", 2), ("distributed", 4)):
        for rank, result in enumerate(results):
            parameters, replies, metrics, buckets, got_version = result[transport]
            assert got_version == version and buckets > 3
            assert len(replies) == 4
            for reply in replies:
                ids, meta = PROMPT + reply["output_ids"], reply["meta_info"]
                served = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]], dtype=torch.float64)
                expected = reference_log_probs(tiny_model_dir, parameters, ids)[-len(served) :]
                assert (served - expected).abs().max() < 1e-5
                assert meta["weight_version"] == str(version)
            if rank == 0:
                assert metrics["perf/update_weights_bytes"] == sum(p.numel() * 4 for p in parameters.values())
                assert metrics["perf/update_weights_time"] > 0
    assert [result["resumed version"] for result in results] == [4, 4]


class Changed:
    """A source whose weight `name` is not the trainer's."""

    def __init__(self, source, name):
        self.source, self.name = source, name

    def gather(self, specs, out):
        self.source.gather(specs, out)
        for spec, tensor in zip(specs, out, strict=True):
            if spec.name == self.name:
                tensor.view(-1)[-1] += 1e-3


WEIGHT = "model.layers.1.mlp.down_proj.weight"


def failures(rank, world_size, port, model_dir, urls, pid):
    """Messages of what must fail, by kind; the engines heal with the next good update in between."""
    out = {}
    for transport, colocate in (("tensor", True), ("distributed", False)):
        trainer = make_local_trainer(rank, world_size, port, model_dir, colocate=colocate)
        trainer.set_rollout_engines(urls[:1] if colocate else urls, [[0]] if colocate else [[0], [1]])
        updater, good, buckets = trainer.updater, trainer.weights, trainer.updater.buckets
        updater.source = Changed(good, WEIGHT)
        trainer.updater.update()
        updater.source = good
        out[f"{transport}: changed"] = message_of(updater.check)
        updater.buckets = plan_buckets([s for s in good.tensor_specs() if s.name != WEIGHT], 40000)
        out[f"{transport}: missing"] = message_of(updater.check)
        updater.buckets = buckets
        trainer.update_weights()
        trainer.check_weights()
        out[f"{transport}: serves"] = generate(urls[0])["meta_info"]["weight_version"]
        if colocate:
            updater.close()

    # An engine dies between two buckets; the others, which wait for the rest of it, serve with the next update.
    send, sent = updater.transport.send, []

    def send_then_kill(*bucket):
        send(*bucket)
        sent.append(bucket)
        if len(sent) == 2:
            os.kill(pid, signal.SIGKILL)

    updater.transport.send = send_then_kill
    version = updater.version
    out["gone"] = message_of(trainer.update_weights)
    trainer.set_rollout_engines(urls[:1], [[0]])
    trainer.update_weights()
    out["served after"] = generate(urls[0])["meta_info"]["weight_version"], str(version + 1)
    return out


def message_of(action):
    with pytest.raises(WeightSyncError) as error:
        action()
    return str(error.value)


def test_failures_name_engine_and_weight(tiny_model_dir, servers):
    urls = [server.url for server in servers]
    (messages,) = run_world(failures, 1, tiny_model_dir, urls, servers[1].process.pid)
    for transport in ("tensor", "distributed"):
        for kind in ("changed", "missing"):
            message = messages[f"{transport}: {kind}"]
            assert WEIGHT in message and "/weights_checker" in message and urls[0] in message, message
        assert messages[f"{transport}: serves"] == "2"
    assert urls[1] in messages["gone"] and "/update_weights_from_distributed" in messages["gone"]
    assert messages["served after"][0] == messages["served after"][1]
