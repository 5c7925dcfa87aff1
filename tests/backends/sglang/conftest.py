"""Checkpoints that the tests against stock SGLang share."""

import pytest

from tests.tiny_model import save_tiny_moe


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory) -> str:
    """Three layers of eight experts."""
    path = str(tmp_path_factory.mktemp("moe"))
    save_tiny_moe(path, num_hidden_layers=3, num_experts=8)
    return path
