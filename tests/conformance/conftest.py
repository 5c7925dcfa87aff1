"""One running server per engine for the whole session; every test gets it with the checkpoint's weights, idle.

The embedded engine always runs. SGLang runs where it is installed; SLIME_TEST_SGLANG=1 makes its absence an error,
SLIME_TEST_SGLANG=0 leaves it out.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

from slime.backends.sglang_utils.compat import installed_version
from slime.backends.sglang_utils.cpu import complete_torchvision
from tests.conformance.servers import SGLangServer
from tests.engine.server_process import Background, EngineServer
from tests.tiny_model import save_tiny_model

ENGINES = ("embedded", "sglang")
WANTED = os.environ.get("SLIME_TEST_SGLANG", "1" if installed_version() else "0") == "1"
_servers: dict[str, EngineServer] = {}
_failures: dict[str, str] = {}

if WANTED and importlib.util.find_spec("torchvision"):
    complete_torchvision()  # transformers imports it in this process, too


def pytest_generate_tests(metafunc):
    if "server" in metafunc.fixturenames:
        without = pytest.mark.skipif(not WANTED, reason="SGLang is not installed, or SLIME_TEST_SGLANG=0")
        params = [pytest.param("embedded"), pytest.param("sglang", marks=[without, pytest.mark.timeout(900)])]
        metafunc.parametrize("server", params, indirect=True)


@pytest.fixture(scope="session")
def start_server(tiny_model_dir, tmp_path_factory):
    """Start the server of an engine at its first use; it stays up."""

    def start(kind: str) -> EngineServer:
        if kind in _failures:
            pytest.fail(_failures[kind])
        if kind not in _servers:
            make = {"embedded": EngineServer, "sglang": SGLangServer}[kind]
            flags = ["--max-running-requests", "32"] if kind == "embedded" else []
            server = make(tiny_model_dir, tmp_path_factory.mktemp(kind), *flags)
            try:
                _servers[kind] = server.wait()
            except RuntimeError as error:
                server.process.kill()
                _failures[kind] = str(error)
                raise
        return _servers[kind]

    yield start
    for server in _servers.values():
        server.stop()
    _servers.clear()


def reset(server: EngineServer, model_dir: str) -> None:
    """The checkpoint's weights, nothing held, nothing cached, all memory there."""
    server.ok("/resume_memory_occupation", {})
    server.ok("/abort_request", {"abort_all": True})
    server.ok("/continue_generation", {})
    server.ok("/update_weights_from_disk", {"model_path": model_dir, "weight_version": "default"})
    server.request("/end_weight_update", {})  # where a test left one open
    server.ok("/flush_cache", {})


@pytest.fixture
def server(request, start_server, tiny_model_dir):
    server = start_server(request.param)
    reset(server, tiny_model_dir)
    yield server
    assert server.process.poll() is None, server.log.read_text()[-4000:]
    reset(server, tiny_model_dir)
    assert server.ok("/health") in (None, "")


@pytest.fixture
def background(server):
    background = Background(server)
    yield background
    server.ok("/continue_generation", {})
    background.close()


@pytest.fixture(scope="session")
def hf_model(tiny_model_dir):
    """The same checkpoint in plain transformers, fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory) -> str:
    """The tiny model with other weights."""
    path = str(tmp_path_factory.mktemp("other-model"))
    save_tiny_model(path, seed=1)
    return path


@pytest.fixture(scope="session")
def other_model(other_model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(other_model_dir, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def other_weights(other_model_dir):
    from safetensors.torch import load_file

    return load_file(f"{other_model_dir}/model.safetensors")
