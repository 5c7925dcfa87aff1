"""Both routers as processes of a run; sglang-router where SLIME_TEST_SGLANG_ROUTER_ENV names its environment."""

import contextlib
import os
import signal
import socket
import sys

import pytest

from slime.arguments.entry import load_args
from slime.ray.router_process import RouterProcess
from slime.ray.server_process import ServerError, http_json
from slime.router import sglang
from slime.testing.scripted_engine import ScriptedEngine, served_in_thread
from slime.utils.served_models import ServedModel, ServerGroup
from tests.engine.server_process import EngineServer

pytestmark = pytest.mark.integration
SGLANG_ROUTER_ENV = os.environ.get("SLIME_TEST_SGLANG_ROUTER_ENV")


@pytest.fixture(scope="module")
def engine(tiny_model_dir, tmp_path_factory):
    server = EngineServer(tiny_model_dir, tmp_path_factory.mktemp("engine")).wait()
    yield server
    server.stop()


def arguments(tiny_model_dir, tmp_path, *flags):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"input": "x"}\n')
    return load_args(
        ["--train-backend", "fsdp", "--device", "cpu", "--hf-checkpoint", tiny_model_dir, "--prompt-data", str(data)]
        + ["--rollout-batch-size", "1", "--global-batch-size", "1", "--num-rollout", "1", "--rm-type", "math"]
        + [
            "--actor-num-gpus-per-node",
            "1",
            "--colocate",
            "--rollout-max-response-len",
            "8",
            "--run-dir",
            str(tmp_path / "run"),
            *flags,
        ]
    )


def test_a_router_that_is_not_there_is_named(tiny_model_dir, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = arguments(tiny_model_dir, tmp_path, "--sglang-router-ip", "127.0.0.1", "--sglang-router-port", str(port))
    router = RouterProcess(args, tmp_path / "router.log", args.served_models[0])
    with pytest.raises(ServerError, match=f"--sglang-router-port {port}: no router answers there.*refused"):
        router.start()


PAYLOAD = {"text": "what is the sum of 3 and 4 ?", "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
KINDS = [
    pytest.param(("--use-slime-router",), id="slime"),
    pytest.param(
        ("--sglang-router-env", SGLANG_ROUTER_ENV, "--router-policy", "round_robin", "--router-log-level", "warn"),
        id="sglang-router",
        marks=pytest.mark.skipif(not SGLANG_ROUTER_ENV, reason="SLIME_TEST_SGLANG_ROUTER_ENV is not set"),
    ),
]


@pytest.mark.parametrize("flags", KINDS)
def test_registered_engines_answer(engine, tiny_model_dir, tmp_path, flags):
    args = arguments(tiny_model_dir, tmp_path, *flags)
    router = RouterProcess(args, tmp_path / "router.log", args.served_models[0])
    try:
        url = router.start()
        router.add(engine.url)
        reply = http_json("POST", url + "/generate", PAYLOAD)
        assert len(reply["meta_info"]["output_token_logprobs"]) > 0
        os.kill(router.process.pid, signal.SIGKILL)
        router.process.wait_for_death()
        assert router.is_dead()
        assert router.start() == url  # requests find it again
        router.add(engine.url)
        assert http_json("POST", url + "/generate", PAYLOAD)["meta_info"]["completion_tokens"] > 0
        router.remove(engine.url)
        router.remove(engine.url)
    finally:
        router.close()


def test_other_nodes_reach_it_where_they_send_requests(engine, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("ray.nodes", lambda: [{}, {}])
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.2")
    for flags, host in (((), "127.0.0.1"), (("--use-distributed-post",), "127.0.0.2")):
        args = arguments(tiny_model_dir, tmp_path, "--use-slime-router", *flags)
        router = RouterProcess(args, tmp_path / "router.log", args.served_models[0])
        try:
            assert router.start().startswith(f"http://{host}:")
            router.add(engine.url)
            assert http_json("POST", router.url + "/generate", PAYLOAD)["meta_info"]["completion_tokens"] > 0
        finally:
            router.close()


@pytest.mark.skipif(not SGLANG_ROUTER_ENV, reason="SLIME_TEST_SGLANG_ROUTER_ENV is not set")
def test_a_request_goes_to_a_prefill_and_a_decode_server(tiny_model_dir, tmp_path):
    """Both get it, with the place where they meet."""
    args = arguments(tiny_model_dir, tmp_path, "--sglang-router-env", SGLANG_ROUTER_ENV)
    groups = (ServerGroup("prefill", 1, 1), ServerGroup("decode", 1, 1))
    args.served_models = (ServedModel("default", tiny_model_dir, True, groups),)
    router = RouterProcess(args, tmp_path / "router.log", args.served_models[0])
    engines = {kind: ScriptedEngine(version=kind) for kind in ("prefill", "decode")}
    with contextlib.ExitStack() as stack:
        stack.callback(router.close)
        url = router.start()
        for kind, port in (("prefill", 12345), ("decode", None)):
            app = engines[kind].app()
            for path in ("/health", "/server_info", "/get_server_info", "/model_info"):
                app.router.add_get(path, engines[kind].model_info)
            router.add(stack.enter_context(served_in_thread(app)), kind, port)
        params = {"max_new_tokens": 3, "sampling_seed": 1}
        reply = http_json("POST", url + "/generate", {"input_ids": [5, 6], "sampling_params": params}, timeout=60)
        assert reply["meta_info"]["weight_version"] == "decode"
        (prefill,), (decode,) = (engines[kind].requests for kind in ("prefill", "decode"))
        for request in (prefill, decode):
            assert (request["bootstrap_host"], request["bootstrap_port"]) == ("127.0.0.1", 12345)
        assert prefill["bootstrap_room"] == decode["bootstrap_room"]


@pytest.mark.unit
def test_options_of_sglang_router(tiny_model_dir, tmp_path):
    args = arguments(
        tiny_model_dir, tmp_path, "--sglang-router-env", sys.executable, "--router-dp-aware",
        "--router-policy", "manual", "--router-selector", "a=1", "b=2", "--router-cache-threshold", "0.5",
    )  # fmt: skip
    assert sorted(" ".join(sglang.options(args)).split("--")[1:]) == [
        "cache-threshold 0.5 ", "dp-aware", "policy manual ", "selector a=1 b=2 "
    ]  # fmt: skip
    assert not args.use_slime_router


def test_a_wrong_option_is_shown(tiny_model_dir, tmp_path):
    flags = ("--use-slime-router", "--slime-router-middleware-paths", "tests.router.test_server.Shout")
    args = arguments(tiny_model_dir, tmp_path, *flags)
    args.slime_router_middleware_paths = ["tests.router.test_server.PAYLOAD"]
    router = RouterProcess(args, tmp_path / "router.log", args.served_models[0])
    with pytest.raises(ServerError, match="--slime-router-middleware-paths"):
        router.start()
    router.close()
