"""A model learns to search: it writes a query, a local retrieval server answers, and it reads the answer out."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.common.launch import parse, slime
from examples.common.tiny import SFT_BATCH, model_from_demonstrations, write_jsonl

SFT_STEPS = 160
LANDS = 40
SYLLABLES = "ba do fe gi ka lu mo ne pi ru sa to va wi zu".split()
QUESTIONS = {"capital": "capital", "river": "river", "flum": "capital"}
"""What a question asks for. The demonstrations guess what a `flum` is: what raises accuracy is the reward."""
GUESSES = {"capital": ["capital"], "river": ["river"], "flum": ["capital", "river"]}


def word(rng: random.Random) -> str:
    return "".join(rng.sample(SYLLABLES, 2)).capitalize()


def make_world(seed: int = 0) -> dict[str, dict[str, str]]:
    """Lands with a capital and a river each."""
    rng = random.Random(seed)
    return {word(rng) + "land": {"capital": word(rng), "river": word(rng)} for _ in range(LANDS)}


def passage(land: str, kind: str, name: str) -> str:
    return f"{kind} of {land}: {name}"


def question(land: str, asked: str) -> dict[str, str]:
    return {"role": "user", "content": f"Name the {asked} of {land}."}


def demonstration(world: dict, rng: random.Random) -> list[dict[str, str]]:
    land, asked = rng.choice(sorted(world)), rng.choice(sorted(QUESTIONS))
    kind = rng.choice(GUESSES[asked])
    # Made-up names: they can only be copied from what was found.
    name = word(rng)
    found = f"<information>{passage(land, kind, name)}</information>"
    text = f"<search>{kind} of {land}</search>\n{found}\n<answer>{name}</answer>"
    return [question(land, asked), {"role": "assistant", "content": text}]


def prompt(world: dict, rng: random.Random) -> dict[str, object]:
    land, asked = rng.choice(sorted(world)), rng.choice(sorted(QUESTIONS))
    return {"messages": [question(land, asked)], "label": world[land][QUESTIONS[asked]]}


@contextlib.contextmanager
def retrieval_server(corpus: Path) -> Iterator[str]:
    """The server of `retrieval.py` as a process; yields its address."""
    port_file = corpus.with_suffix(".port")
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "examples.search_r1.retrieval", "--corpus", str(corpus)]
    process = subprocess.Popen([*command, "--port-file", str(port_file)], cwd=Path(__file__).resolve().parents[2])
    try:
        while not port_file.exists():
            if process.poll() is not None:
                raise SystemExit(f"the retrieval server ended with {process.returncode}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text()}"
    finally:
        process.terminate()
        process.wait()


def main(argv: Sequence[str] | None = None) -> None:
    options = parse("search_r1", __doc__, argv, SFT_STEPS)
    flags: dict[str, object] = {
        **options.settings(),
        "--colocate": None,
        "--custom-generate-function-path": "examples.search_r1.generate.generate",
        "--custom-rm-path": "examples.search_r1.generate.exact_match",
        "--log-multi-turn": None,
        "--rollout-batch-size": 32,
        "--n-samples-per-prompt": 8,
        "--global-batch-size": 256,
        "--num-rollout": 30,
        "--run-dir": options.work / "run",
    }
    if options.model is not None:
        # Your own server stands in your --custom-config-path as search_url.
        slime("train", flags | {"--hf-checkpoint": options.model}, options.flags)
        return
    world, rng = make_world(), random.Random(0)
    demonstrations = [demonstration(world, rng) for _ in range(options.sft_steps * SFT_BATCH)]
    facts = [passage(land, kind, name) for land, names in world.items() for kind, name in names.items()]
    corpus = write_jsonl(
        options.work / "corpus.jsonl", ({"id": str(i), "contents": fact} for i, fact in enumerate(facts))
    )
    flags |= {
        "--hf-checkpoint": model_from_demonstrations(options.work, demonstrations),
        "--prompt-data": write_jsonl(options.work / "prompts.jsonl", (prompt(world, rng) for _ in range(512))),
        "--input-key": "messages",
        "--label-key": "label",
        "--apply-chat-template": None,
        "--rollout-max-response-len": 96,
        "--lr": 4e-4,
    }
    with retrieval_server(corpus) as url:
        config = options.work / "search.yaml"
        config.write_text(f"search_url: {url}\n")
        slime("train", {**flags, "--custom-config-path": config}, options.flags)


if __name__ == "__main__":
    main()
