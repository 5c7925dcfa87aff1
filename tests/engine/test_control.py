"""Abort, pause, continue, memory release and process life, over HTTP."""

import signal
import subprocess
import sys

import pytest

from tests.engine.server_process import Background, EngineServer

pytestmark = pytest.mark.integration

LONG = {"max_new_tokens": 480, "ignore_eos": True, "sampling_seed": 1}


def wait_tokens(server, count: int) -> None:
    """Wait until `count` more tokens have been generated."""
    goal = server.load()["num_generated_tokens"] + count
    server.wait_load(lambda load: load["num_generated_tokens"] >= goal)


def test_abort_by_rid_and_all(server, background):
    one = background.generate([5, 6, 7], rid="one", **LONG)
    two = background.generate([5, 6, 8], rid="two", **LONG)
    wait_tokens(server, 10)
    server.ok("/abort_request", {"rid": "one"})
    reply = one.result(30)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < 480
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])
    assert not two.done()
    server.ok("/abort_request", {"abort_all": True})
    assert two.result(30)["meta_info"]["finish_reason"]["type"] == "abort"
    server.ok("/abort_request", {"rid": "nobody"})


def test_an_aborted_group_rid_ends_all_its_samples(server, background):
    group = background.generate([5, 6, 7], rid="group", n=3, **LONG)
    wait_tokens(server, 10)
    server.ok("/abort_request", {"rid": "group"})
    assert [r["meta_info"]["finish_reason"]["type"] for r in group.result(30)] == ["abort"] * 3


def test_a_rid_in_flight_is_refused(server, background):
    first = background.generate([5, 6, 7], rid="same", **LONG)
    wait_tokens(server, 5)
    assert "in flight" in server.error("/generate", {"input_ids": [5], "rid": "same"})
    server.ok("/abort_request", {"rid": "same"})
    first.result(30)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_holds_everything_and_continue_changes_nothing(server, background, mode):
    expected = server.generate([9, 10, 11], max_new_tokens=300, ignore_eos=True, sampling_seed=3)["output_ids"]
    server.ok("/flush_cache")
    running = background.generate([9, 10, 11], max_new_tokens=300, ignore_eos=True, sampling_seed=3)
    wait_tokens(server, 40)
    server.ok("/pause_generation", {"mode": mode})
    late = background.generate([9, 10, 12], max_new_tokens=2, ignore_eos=True)
    load = server.wait_load(lambda load: load["num_total_reqs"] == 2)
    assert load["num_running_reqs"] == (1 if mode == "in_place" else 0)
    assert (load["num_used_tokens"] > 0) == (mode == "in_place")
    steps = load["num_steps"]
    assert server.request("/health_generate")[0] == 200
    assert server.load()["num_steps"] == steps and not running.done() and not late.done()
    server.ok("/continue_generation", {})
    reply = running.result(30)
    assert reply["output_ids"] == expected
    assert reply["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    assert len(late.result(30)["output_ids"]) == 2


def test_pause_abort_returns_partial_output_and_holds_new_requests(server, background):
    running = background.generate([9, 10, 11], **LONG)
    wait_tokens(server, 10)
    server.ok("/pause_generation", {})
    assert running.result(30)["meta_info"]["finish_reason"]["type"] == "abort"
    late = background.generate([9, 10, 12], max_new_tokens=2)
    server.wait_load(lambda load: load["num_waiting_reqs"] == 1)
    assert not late.done()
    server.ok("/abort_request", {"abort_all": True})
    reply = late.result(30)
    assert reply["output_ids"] == [] and reply["meta_info"]["finish_reason"]["type"] == "abort"
    server.ok("/continue_generation", {})


def test_released_memory_is_an_error_never_garbage(server, background, tiny_model_dir):
    expected = server.generate([5, 6, 7], max_new_tokens=5, temperature=0)["output_ids"]
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    server.ok("/release_memory_occupation", {})
    assert server.request("/health")[0] == server.request("/health_generate")[0] == 200
    assert "released" in server.error("/generate", body, status=503)
    assert "released" in server.error("/update_weights_from_disk", {"model_path": tiny_model_dir})
    assert "released" in server.error("/weights_checker", {"action": "checksum"})
    server.ok("/release_memory_occupation", {})
    server.ok("/resume_memory_occupation", {"tags": ["weights"]})
    assert "KV cache is released" in server.error("/generate", body, status=503)
    server.ok("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert "no content until they are pushed" in server.error("/generate", body, status=503)
    server.ok("/update_weights_from_disk", {"model_path": tiny_model_dir})
    assert server.ok("/generate", body)["output_ids"] == expected
    server.ok("/release_memory_occupation", {"tags": ["kv_cache"]})
    server.ok("/resume_memory_occupation", {})
    assert server.ok("/generate", body)["output_ids"] == expected
    assert "unknown memory tags" in server.error("/release_memory_occupation", {"tags": ["disk"]})
    assert "tags must be" in server.error("/resume_memory_occupation", {"tags": "weights"})


def test_release_while_requests_run_is_refused_unless_retracted(server, background, tiny_model_dir):
    expected = server.generate([5, 6, 7], max_new_tokens=200, ignore_eos=True, sampling_seed=2)["output_ids"]
    running = background.generate([5, 6, 7], max_new_tokens=200, ignore_eos=True, sampling_seed=2)
    wait_tokens(server, 5)
    assert "1 requests are running" in server.error("/release_memory_occupation", {})
    server.ok("/pause_generation", {"mode": "retract"})
    server.ok("/release_memory_occupation", {})
    assert "released" in server.error("/continue_generation", {}, status=503)
    server.ok("/resume_memory_occupation", {})
    server.ok("/update_weights_from_disk", {"model_path": tiny_model_dir})
    server.ok("/continue_generation", {})
    assert running.result(30)["output_ids"] == expected


@pytest.fixture(scope="module")
def small_server(tiny_model_dir, tmp_path_factory):
    """Few KV blocks, small chunks, weights backed up."""
    flags = ["--max-total-tokens", "128", "--page-size", "4", "--chunked-prefill-size", "16"]
    server = EngineServer(tiny_model_dir, tmp_path_factory.mktemp("small"), *flags, "--enable-weights-cpu-backup")
    try:
        yield server.wait()
    finally:
        server.stop()


def test_preemption_gives_the_same_tokens(server, small_server):
    """Requests that do not fit together are retracted and computed again; the result does not show it."""
    assert small_server.ok("/server_info")["max_context"] == 128
    batch = [[10 + i, 20 + i, 30 + i] * 4 for i in range(6)]
    params = [{"sampling_seed": i, "max_new_tokens": 60, "ignore_eos": True} for i in range(6)]
    body = {"input_ids": batch, "sampling_params": params, "return_logprob": True}
    replies, expected = small_server.ok("/generate", body), server.ok("/generate", body)
    assert [r["output_ids"] for r in replies] == [r["output_ids"] for r in expected]
    assert sum(r["meta_info"]["num_retractions"] for r in replies) > 0
    for got, want in zip(replies, expected, strict=True):
        pairs = zip(got["meta_info"]["output_token_logprobs"], want["meta_info"]["output_token_logprobs"], strict=True)
        assert max(abs(a[0] - b[0]) for a, b in pairs) <= 1e-5
    assert small_server.ok("/server_info")["integrity"] == "ok"
    assert small_server.load()["num_used_tokens"] == 0


def test_chunked_prefill_and_the_context_limit(server, small_server):
    ids = [4 + i % 100 for i in range(120)]
    got = small_server.ok("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 50, "temperature": 0}})
    want = server.generate(ids, max_new_tokens=8, temperature=0)
    assert got["output_ids"] == want["output_ids"]
    assert got["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert "the prompt has 128 tokens" in small_server.error("/generate", {"input_ids": [5] * 128})
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    got, want = (s.ok("/generate", body)["meta_info"]["input_token_logprobs"] for s in (small_server, server))
    assert max(abs(a[0] - b[0]) for a, b in zip(got[1:], want[1:], strict=True)) <= 1e-5


def test_backed_up_weights_come_back_by_themselves(small_server):
    before = small_server.generate([5, 6, 7], max_new_tokens=5, temperature=0)["output_ids"]
    checksums = small_server.ok("/weights_checker", {"action": "checksum"})["ranks"]
    small_server.ok("/release_memory_occupation", {})
    small_server.ok("/resume_memory_occupation", {})
    assert small_server.generate([5, 6, 7], max_new_tokens=5, temperature=0)["output_ids"] == before
    assert small_server.ok("/weights_checker", {"action": "checksum"})["ranks"] == checksums


def test_the_server_ends_with_its_parent_and_on_sigterm(tiny_model_dir, tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    orphan = EngineServer(tiny_model_dir, tmp_path, parent_pid=parent.pid)
    try:
        orphan.wait()
        background = Background(orphan)
        running = background.pool.submit(orphan.request, "/generate", {"input_ids": [5], "sampling_params": LONG})
        orphan.wait_load(lambda load: load["num_total_reqs"] == 1)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        assert orphan.process.wait(20) == 0
        assert running.exception(10) is not None or running.result()[0] == 200
        background.close()
    finally:
        parent.kill()
        orphan.process.kill()


def test_bad_command_lines(tmp_path):
    command = [sys.executable, "-m", "slime.engine.server"]
    for flags, message in (
        (["--model-path", str(tmp_path)], "has no config.json"),
        (["--model-path", str(tmp_path), "--page-size", "0"], "--page-size must be at least 1"),
    ):
        done = subprocess.run(command + flags, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and message in done.stderr
