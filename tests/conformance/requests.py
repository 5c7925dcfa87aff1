"""Prompts, references and payloads that the suite shares."""

from __future__ import annotations

import base64
import pickle
import random
from types import SimpleNamespace

import torch

EOS = 3
TOLERANCE = 1e-4
"""Log-probs in fp32 against plain transformers."""


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 128) for _ in range(rng.randint(low, high))] for _ in range(count)]


def reference_logprobs(model, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [T - 1] of ids[1:] by one forward."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def output_logprobs(reply) -> torch.Tensor:
    entries = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, *_ in entries] == reply["output_ids"]
    return torch.tensor([logprob for logprob, *_ in entries], dtype=torch.float64)


def error_to(model, prompt: list[int], reply, temperature: float = 1.0, start: int = 0) -> float:
    """Largest difference between a reply's log-probs from token `start` on and those of `model`."""
    expected = reference_logprobs(model, prompt + reply["output_ids"], temperature)[len(prompt) - 1 :]
    return (output_logprobs(reply) - expected)[start:].abs().max().item()


def encode(payload, pickler=pickle) -> str:
    return base64.b64encode(bytes(pickler.dumps(payload))).decode()


def bucket(named: dict[str, torch.Tensor], flat: torch.Tensor | None = None) -> dict:
    """A flattened bucket; `flat` is the memory to put it in."""
    metadata, offset = [], 0
    for name, tensor in named.items():
        end = offset + tensor.numel()
        meta = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "start_idx": offset, "end_idx": end}
        metadata.append(SimpleNamespace(**meta, numel=tensor.numel()))
        offset = end
    content = torch.cat([tensor.reshape(-1) for tensor in named.values()])
    return {"flattened_tensor": content if flat is None else flat.copy_(content), "metadata": metadata}


LONG_PROMPT = list(range(10, 50))


def start_long(server, background, rid: str, tokens: int = 400):
    """A long request that is surely being decoded when this returns; its future."""
    future = background.generate(LONG_PROMPT, rid=rid, max_new_tokens=tokens, ignore_eos=True)
    probe = {"input_ids": [8], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    for _ in range(2):
        server.ok("/generate", probe)
    assert not future.done()
    return future
