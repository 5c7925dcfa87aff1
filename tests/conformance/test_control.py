"""Pausing, memory, health and information: the same for every engine, with the stock server's hazards."""

import concurrent.futures

import pytest

from tests.conformance.requests import LONG_PROMPT, TOLERANCE, encode, error_to, start_long

pytestmark = pytest.mark.integration

HELD = ["in_place", "retract"]


def is_waiting(future, seconds: float = 0.7) -> bool:
    """Whether a request gets no answer for a while."""
    return not concurrent.futures.wait([future], timeout=seconds).done


def push_all(server, weights, version: str = "pushed", **fields) -> None:
    """A whole update by value."""
    body = {"serialized_named_tensors": [encode(list(weights.items()))], "weight_version": version, **fields}
    server.ok("/begin_weight_update", {})
    server.ok("/update_weights_from_tensor", body)
    server.ok("/end_weight_update", {})


def test_pause_abort_returns_partial_output_and_holds_what_comes(server, background, hf_model):
    running = start_long(server, background, "running")
    server.ok("/pause_generation", {"mode": "abort"})
    reply = running.result(30)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < 400 and error_to(hf_model, LONG_PROMPT, reply) <= TOLERANCE
    late = background.generate([9, 10, 12], max_new_tokens=2, ignore_eos=True)
    assert is_waiting(late)
    server.ok("/flush_cache", {})
    assert server.request("/health_generate")[0] == 200 and not late.done()
    server.ok("/continue_generation", {})
    assert len(late.result(30)["output_ids"]) == 2


@pytest.mark.parametrize("mode", HELD)
def test_pause_holds_requests_and_continue_finishes_them(server, background, hf_model, mode):
    running = start_long(server, background, "running")
    server.ok("/pause_generation", {"mode": mode})
    late = background.generate([9, 10, 12], max_new_tokens=2, ignore_eos=True)
    assert is_waiting(late) and not running.done()
    assert server.request("/health")[0] == server.request("/health_generate")[0] == 200
    server.ok("/continue_generation", {})
    reply = running.result(60)
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 400}
    assert error_to(hf_model, LONG_PROMPT, reply) <= TOLERANCE
    assert len(late.result(30)["output_ids"]) == 2


def test_an_unknown_pause_mode_is_refused(server):
    assert "mode" in server.error("/pause_generation", {"mode": "sleep"})
    server.generate([5], max_new_tokens=1)


@pytest.mark.parametrize("mode", HELD)
def test_a_flush_never_hurts_held_requests(server, background, hf_model, mode):
    """Refused, or harmless."""
    running = start_long(server, background, "running")
    server.ok("/pause_generation", {"mode": mode})
    assert server.request("/flush_cache", {})[0] in (200, 400)
    server.ok("/continue_generation", {})
    assert error_to(hf_model, LONG_PROMPT, running.result(60)) <= TOLERANCE


def test_released_memory(server, background, hf_model, tiny_model_dir):
    """In the order of a colocated run; nothing that is asked for at the wrong time does harm."""
    expected = server.generate(LONG_PROMPT, max_new_tokens=4, temperature=0, ignore_eos=True)["output_ids"]
    server.ok("/flush_cache", {})
    server.ok("/release_memory_occupation", {})
    server.ok("/release_memory_occupation", {"tags": ["kv_cache"]})
    for path in ("/health", "/health_generate", "/get_model_info", "/get_server_info"):
        assert server.request(path)[0] == 200, path
    assert "resume_memory_occupation" in server.error("/generate", {"input_ids": [5]}, status=503)
    assert server.request("/weights_checker", {"action": "checksum"})[0] == 400
    server.ok("/resume_memory_occupation", {"tags": ["weights"]})
    server.ok("/resume_memory_occupation", {"tags": ["weights"]})
    assert server.request("/generate", {"input_ids": [5]})[0] == 503
    body = {"model_path": tiny_model_dir, "weight_version": "back", "flush_cache": False}
    server.ok("/update_weights_from_disk", body)
    server.ok("/resume_memory_occupation", {"tags": ["cuda_graph", "kv_cache"]})
    server.ok("/resume_memory_occupation", {})
    reply = server.generate(LONG_PROMPT, max_new_tokens=4, temperature=0, ignore_eos=True)
    assert reply["output_ids"] == expected and error_to(hf_model, LONG_PROMPT, reply) <= TOLERANCE
    assert (reply["meta_info"]["weight_version"], reply["meta_info"]["cached_tokens"]) == ("back", 0)


def test_weights_that_came_back_empty_are_not_served(server, other_weights, other_model):
    server.ok("/release_memory_occupation", {})
    server.ok("/resume_memory_occupation", {})
    assert "pushed" in server.error("/generate", {"input_ids": [5]}, status=503)
    assert server.request("/health_generate")[0] == 200
    server.ok("/begin_weight_update", {})
    server.ok("/end_weight_update", {})  # an update of nothing
    assert "pushed" in server.error("/generate", {"input_ids": [5]}, status=503)
    push_all(server, other_weights)
    reply = server.generate(LONG_PROMPT, max_new_tokens=4, ignore_eos=True)
    assert error_to(other_model, LONG_PROMPT, reply) <= TOLERANCE


def test_memory_is_not_released_under_running_requests(server, background):
    running = start_long(server, background, "running")
    assert "running" in server.error("/release_memory_occupation", {})
    server.ok("/pause_generation", {"mode": "in_place"})
    assert "running" in server.error("/release_memory_occupation", {})
    server.ok("/continue_generation", {})
    server.ok("/abort_request", {"abort_all": True})
    assert running.result(30)["meta_info"]["finish_reason"]["type"] == "abort"


def test_bad_memory_tags(server):
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert "cpu_cache" in server.error(path, {"tags": ["weights", "cpu_cache"]})
        assert "list" in server.error(path, {"tags": "weights"})


def test_information(server, tiny_model_dir):
    info = server.ok("/get_model_info")
    assert (info["model_path"], info["weight_version"], info["is_generation"]) == (tiny_model_dir, "default", True)
    assert server.ok("/model_info")["weight_version"] == "default"
    assert server.ok("/get_weight_version") == server.ok("/weight_version") == {"weight_version": "default"}
    server_info = server.ok("/get_server_info")
    assert server_info["model_path"] == tiny_model_dir and server_info["max_total_num_tokens"] > 0
    load = server.ok("/v1/loads")["loads"][0]
    assert {"num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage"} <= set(load)
    assert server.ok("/v1/models")["data"][0]["max_model_len"] == 512


def test_the_weight_version_can_be_named(server, background):
    running = start_long(server, background, "running")
    server.ok("/update_weight_version", {"new_version": "v9", "abort_all_requests": False})
    assert server.ok("/get_weight_version")["weight_version"] == "v9" and not running.done()
    server.ok("/update_weight_version", {"new_version": "default", "abort_all_requests": True})
    assert running.result(30)["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.request("/update_weight_version", {})[0] in (400, 422)
