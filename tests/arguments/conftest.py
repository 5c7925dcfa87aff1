"""A configuration that is right; tests break one thing at a time."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.arguments.entry import load_args
from slime.arguments.problems import ConfigError


class Setup:
    """A checkpoint directory, a data file, and the flags that use them."""

    def __init__(self, root: Path):
        self.root = root
        self.model = self.write_model("model")
        self.data = self.write_rows("train.jsonl", [{"input": "1 + 1 =", "label": "2"}])
        self.flags = {
            "--hf-checkpoint": self.model,
            "--prompt-data": self.data,
            "--rm-type": "math",
            "--num-rollout": "3",
            "--rollout-batch-size": "8",
            "--n-samples-per-prompt": "4",
            "--actor-num-gpus-per-node": "2",
            "--rollout-max-response-len": "64",
            "--device": "cpu",
        }

    def write_model(self, name: str, **config) -> str:
        path = self.root / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps({"max_position_embeddings": 512} | config))
        (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (path / "tokenizer.json").write_text("{}")
        return str(path)

    def write_rows(self, name: str, rows: list) -> str:
        return self.write(name, "".join(json.dumps(row) + "\n" for row in rows))

    def write(self, name: str, content: str) -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return str(path)

    def yaml(self, content: str) -> list[str]:
        return ["--custom-config-path", self.write("custom.yaml", content)]

    def argv(self, *words: str, without: tuple[str, ...] = ("",), colocate: bool = True) -> list[str]:
        flags = {name: value for name, value in self.flags.items() if name not in without}
        argv = [word for pair in flags.items() for word in pair]
        return [*argv, *(["--colocate"] if colocate else []), *map(str, words)]

    def load(self, *words: str, **kwargs) -> Namespace:
        return load_args(self.argv(*words, **kwargs))

    def errors(self, *words: str, **kwargs) -> str:
        with pytest.raises(ConfigError) as raised:
            self.load(*words, **kwargs)
        return str(raised.value)


@pytest.fixture
def setup(tmp_path) -> Setup:
    return Setup(tmp_path)


@pytest.fixture
def one_error(setup) -> Callable[..., str]:
    """The message of the only problem that these flags cause."""

    def check(*words: str, **kwargs) -> str:
        with pytest.raises(ConfigError) as raised:
            setup.load(*words, **kwargs)
        assert len(raised.value.problems) == 1, raised.value
        return str(raised.value)

    return check
