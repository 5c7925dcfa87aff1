"""The command line of a server, and the devices that engines get."""

import sys
from argparse import Namespace

import pytest

from slime.arguments.parser import resolve
from slime.backends.sglang_utils import compat
from slime.backends.sglang_utils.command import launch_command, launch_env
from slime.backends.sglang_utils.launch import parse_args, reserve_port
from slime.ray.engine_actor import free_port_block
from slime.ray.engines import engine_nodes
from slime.ray.placement_group import PlacementSlice

pytestmark = pytest.mark.unit
needs_sglang = pytest.mark.skipif(compat.installed_version() is None, reason="SGLang is not installed")


def arguments(*words: str, **changes) -> Namespace:
    args = resolve(["--hf-checkpoint", "/models/m", "--dtype", "bfloat16", "--device", "cuda", *words])
    vars(args).update({"offload_rollout": False, **changes})
    return args


def options(command: list[str]) -> dict[str, str | bool]:
    """The flags of a command with their values; True where there is none."""
    words = command[3:]
    followed = zip(words, [*words[1:], "--"], strict=True)
    return {word: True if value.startswith("--") else value for word, value in followed if word.startswith("--")}


def test_what_slime_decides():
    command = launch_command(arguments("--seed", "7"), rank=2, host="127.0.0.1")
    assert command[:3] == [sys.executable, "-m", "slime.backends.sglang_utils.launch"]
    assert options(command) == {
        "--model-path": "/models/m",
        "--host": "127.0.0.1",
        "--dtype": "bfloat16",
        "--random-seed": "9",
        "--tp-size": "1",
        "--skip-server-warmup": True,
        "--log-level-http": "warning",
    }


def test_tensor_parallel_over_nodes_with_memory_saver():
    args = arguments("--rollout-num-gpus-per-engine", "16", "--trust-remote-code", offload_rollout=True)
    given = options(launch_command(args, 0, "10.0.0.2", node_rank=1, nnodes=2, dist_init_addr="10.0.0.1:10240"))
    assert given["--tp-size"] == "16" and given["--enable-memory-saver"] is True and given["--trust-remote-code"]
    assert (given["--nnodes"], given["--node-rank"], given["--dist-init-addr"]) == ("2", "1", "10.0.0.1:10240")


def test_shared_flags_are_passed_on_when_given():
    args = arguments("--sglang-context-length", "4096", "--sglang-mem-fraction-static", "0.7")
    given = options(launch_command(args, 0, "127.0.0.1"))
    assert given["--context-length"] == "4096" and given["--mem-fraction-static"] == "0.7"
    assert "--page-size" not in given and "--max-running-requests" not in given


def test_cpu_defaults_yield_to_the_user():
    args = arguments("--sglang-max-total-tokens", "512", device="cpu", dtype="float32")
    command = launch_command(args, 0, "127.0.0.1")
    given = options(command)
    assert given["--attention-backend"] == "torch_native" and given["--device"] == "cpu"
    assert given["--max-total-tokens"] == "512" and command.count("--max-total-tokens") == 1
    assert launch_env(args, [])["SGLANG_USE_CPU_ENGINE"] == "1"


def test_environment():
    env = launch_env(arguments(), ["4", "5"])
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5" and "SGLANG_USE_CPU_ENGINE" not in env
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in launch_env(arguments(), [])


@needs_sglang
def test_any_server_argument_is_passed_on():
    args = arguments("--sglang-attention-backend", "triton", "--sglang-pp-size", "2", "--sglang-disable-radix-cache")
    args.rollout_num_gpus_per_engine = 4
    given = options(launch_command(args, 0, "127.0.0.1"))
    assert given["--attention-backend"] == "triton" and given["--disable-radix-cache"] is True
    assert given["--tp-size"] == "2" and "2" in (given.get("--pp-size"), given.get("--pipeline-parallel-size"))


def test_the_launcher_takes_its_own_flags_out():
    own, engine = parse_args(["--port-file", "/p", "--model-path", "/m", "--parent-pid", "5", "--tp-size", "2"])
    assert (own.port_file, own.parent_pid) == ("/p", 5)
    assert engine == ["--model-path", "/m", "--tp-size", "2"]


def test_a_reserved_port_is_nobody_elses_and_can_be_bound_by_the_server():
    import socket

    with reserve_port("127.0.0.1") as holder, socket.socket() as other, socket.socket() as server:
        port = holder.getsockname()[1]
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()


def test_free_port_block():
    import socket

    start = free_port_block("127.0.0.1", 8)
    assert 10000 <= start < 30000
    for port in range(start, start + 8):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def slices(nodes: str, gpus: list[str]) -> PlacementSlice:
    return PlacementSlice(None, tuple(range(len(nodes))), "cuda", tuple(nodes), tuple(gpus))


def test_several_engines_on_a_node_and_one_over_several():
    placement = slices("aaaabbbb", list("01230123"))
    assert engine_nodes(placement, range(2, 4)) == [(2, ["2", "3"])]
    assert engine_nodes(placement, range(4, 8)) == [(4, ["0", "1", "2", "3"])]
    assert engine_nodes(placement, range(8)) == [(0, ["0", "1", "2", "3"]), (4, ["0", "1", "2", "3"])]
    on_cpu = slices("aa", ["", ""])
    assert engine_nodes(on_cpu, range(2)) == [(0, [])]


def test_servers_that_share_a_request():
    args = arguments(sglang_disaggregation_mode="prefill", sglang_disaggregation_bootstrap_port=10064)
    given = options(launch_command(args, 0, "127.0.0.1"))
    assert given["--disaggregation-mode"] == "prefill" and given["--disaggregation-bootstrap-port"] == "10064"
    given = options(launch_command(arguments(sglang_disaggregation_mode="decode"), 1, "127.0.0.1"))
    assert given["--disaggregation-mode"] == "decode" and "--disaggregation-bootstrap-port" not in given


def test_adapters_beside_the_base(tiny_model_dir):
    words = ("--hf-checkpoint", tiny_model_dir, "--lora-rank", "8", "--lora-sync", "adapter")
    command = launch_command(arguments(*words, offload_rollout=True), 0, "127.0.0.1")
    at = command.index("--lora-target-modules") + 1
    modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert command[at : at + 7] == modules and command[at + 7].startswith("--")
    given = options(command)
    assert given["--enable-lora"] is True and given["--max-lora-rank"] == "8"
    assert given["--enable-weights-cpu-backup"] is True  # nobody sends the base again
    some = arguments(*words, "--lora-target-modules", "q_proj", "v_proj", "--lora-exclude-modules", "v_proj")
    command = launch_command(some, 0, "127.0.0.1")
    assert command[command.index("--lora-target-modules") + 1 :][:2] == ["q_proj", "--max-loras-per-batch"]
    assert "--enable-weights-cpu-backup" not in command
    assert "--enable-lora" not in launch_command(arguments(*words[:4]), 0, "127.0.0.1")
