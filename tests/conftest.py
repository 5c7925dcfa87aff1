"""Shared fixtures: a tiny model with tokenizer, built in code. Nothing is fetched from a hub."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> str:
    """A random two-layer Qwen3 (64 hidden, 4 heads, 2 KV heads, vocabulary 128) with a word-level tokenizer."""
    path = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(str(path))
    return str(path)
