"""One server for the whole session; tests that change its weights put the checkpoint's back."""

import pytest

from tests.engine.server_process import Background, EngineServer


@pytest.fixture(scope="session")
def engine_server(tiny_model_dir, tmp_path_factory):
    server = EngineServer(tiny_model_dir, tmp_path_factory.mktemp("engine"), "--max-running-requests", "32")
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture
def server(engine_server, tiny_model_dir):
    """The session's server: running, with the checkpoint's weights, idle and whole before and after."""
    engine_server.ok("/resume_memory_occupation", {})
    engine_server.ok("/update_weights_from_disk", {"model_path": tiny_model_dir, "weight_version": "default"})
    engine_server.ok("/flush_cache", {})
    yield engine_server
    engine_server.ok("/continue_generation", {})
    engine_server.ok("/abort_request", {"abort_all": True})
    load = engine_server.load()
    assert (load["num_total_reqs"], load["num_used_tokens"]) == (0, 0), load
    assert engine_server.ok("/get_server_info")["integrity"] == "ok"


@pytest.fixture
def background(server):
    background = Background(server)
    yield background
    background.close()


@pytest.fixture(scope="session")
def hf_model(tiny_model_dir):
    """The same checkpoint in plain transformers, fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager").eval()
