"""Tokens per second: embedded engine, transformers' continuous batching and padded `generate`.

All three run the same random model on the same requests (ragged prompt and output lengths, sampling at temperature 1
with log-probs), interleaved in one process. `python benchmarks/engine.py --device cpu` uses a tiny model,
`--device cuda --shape qwen3-0.6b` a random bf16 model of that shape. The result goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.environment import describe, write_result
from benchmarks.shapes import SHAPES
from slime.engine.engine import Engine, EngineConfig
from slime.engine.protocol import Request, SamplingParams
from slime.modeling.hf import load_causal_lm

PAD = 0


def save_model(path: str, shape: str, dtype: torch.dtype) -> None:
    """A random Qwen3 checkpoint of that shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=4096, eos_token_id=None, pad_token_id=PAD)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(path)


def make_requests(args, vocab_size: int) -> list[tuple[list[int], int]]:
    """(prompt ids, new tokens) of each request: uniform prompts, log-normal outputs."""
    rng = random.Random(args.seed)
    out = []
    for _ in range(args.requests):
        prompt = [rng.randrange(1, vocab_size) for _ in range(rng.randint(args.prompt // 8, args.prompt))]
        new = int(min(args.new, max(4, rng.lognormvariate(0, 0.6) * args.new / 3)))
        out.append((prompt, new))
    return out


class Embedded:
    """slime's engine, in this process."""

    def __init__(self, path: str, dtype: torch.dtype, args):
        self.model = load_causal_lm(path, dtype, args.device)
        # On a GPU, no more KV than the requests need: three systems share the memory.
        tokens = args.batch * (args.prompt + args.new + 16) if args.device == "cuda" else None
        config = EngineConfig(max_running_requests=args.batch, max_total_tokens=tokens)
        self.engine = Engine(self.model, None, set(), config)
        self.engine.start()
        self.count = 0

    def prepare(self) -> None:
        # Prefixes of the previous round must not help.
        self.engine.call(self.engine.flush_cache).result()

    def run(self, requests) -> int:
        done, left, total = threading.Event(), len(requests), 0

        def on_output(seq) -> None:
            nonlocal left, total
            total += len(seq.output_logprobs)
            left -= 1
            if left == 0:
                done.set()

        batch = []
        for prompt, new in requests:
            self.count += 1
            params = SamplingParams(max_new_tokens=new, ignore_eos=True)
            batch.append(Request(str(self.count), prompt, params, return_logprob=True))
        self.engine.call(self.engine.submit, batch, False, on_output).result()
        done.wait()
        return total

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self.engine.stop()


def load_plain(path: str, dtype: torch.dtype, device: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").to(device).eval()


class ContinuousBatching:
    """transformers' continuous batching. Its manager runs during a round only: an idle one spins."""

    def __init__(self, path: str, dtype: torch.dtype, args):
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.model = load_plain(path, dtype, args.device)
        generation = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=args.new,
            eos_token_id=-1,
            pad_token_id=PAD,
        )
        memory = {} if args.device == "cuda" else {"num_blocks": args.cb_blocks, "max_batch_tokens": 2048}
        batching = ContinuousBatchingConfig(
            page_size=args.cb_page,
            max_requests_per_batch=args.batch,
            return_logprobs=True,
            max_memory_percent=0.5,
            **memory,
        )
        self.configs = {"generation_config": generation, "continuous_batching_config": batching}
        self.cuda = args.device == "cuda"

    def prepare(self) -> None:
        self.manager = self.model.init_continuous_batching(**self.configs)
        if self.cuda:
            self.manager.warmup()
        self.manager.start()

    def run(self, requests) -> int:
        for prompt, new in requests:
            self.manager.add_request(prompt, max_new_tokens=new)
        total = left = 0
        left = len(requests)
        while left:
            result = self.manager.get_result(timeout=60)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            if result.is_finished():
                total += len(result.generated_tokens)
                left -= 1
        return total

    def finish(self) -> None:
        self.manager.stop(block=True)

    def close(self) -> None:
        pass


class PaddedGenerate:
    """`model.generate` on left-padded batches; a batch runs until its longest request is done."""

    def __init__(self, path: str, dtype: torch.dtype, args):
        self.model = load_plain(path, dtype, args.device)
        self.batch = args.batch
        self.device = args.device

    def prepare(self) -> None:
        pass

    @torch.inference_mode()
    def run(self, requests) -> int:
        for first in range(0, len(requests), self.batch):
            part = requests[first : first + self.batch]
            longest = max(len(prompt) for prompt, _ in part)
            ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt, _ in part], device=self.device)
            mask = torch.tensor(
                [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in part], device=self.device
            )
            self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=max(new for _, new in part),
                eos_token_id=-1,
                pad_token_id=PAD,
            )
        return sum(new for _, new in requests)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


SYSTEMS = {"embedded": Embedded, "continuous_batching": ContinuousBatching, "padded_generate": PaddedGenerate}


def measure(system, requests) -> tuple[float, float]:
    """Output tokens per second of one round, of wall time and of CPU time; starting and stopping is not counted."""
    system.prepare()
    start, cpu = time.perf_counter(), time.process_time()
    tokens = system.run(requests)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    system.finish()
    return tokens / seconds, tokens / cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--shape", choices=("tiny", "qwen3-0.6b", "qwen3-4b"), help="default: tiny on CPU, qwen3-0.6b on CUDA"
    )
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--batch", type=int, default=None, help="most requests at once")
    parser.add_argument("--prompt", type=int, default=128, help="longest prompt")
    parser.add_argument("--new", type=int, default=None, help="longest output")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--cb-page", type=int, default=256, help="page size of continuous batching")
    parser.add_argument("--cb-blocks", type=int, default=256, help="blocks of continuous batching on CPU")
    parser.add_argument("--no-result", action="store_true", help="print only")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.shape = args.shape or ("qwen3-0.6b" if cuda else "tiny")
    args.requests = args.requests or (512 if cuda else 192)
    args.batch = args.batch or (256 if cuda else 64)
    args.new = args.new or (512 if cuda else 192)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dtype = torch.bfloat16 if cuda else torch.float32
    requests = make_requests(args, SHAPES[args.shape]["vocab_size"])
    with tempfile.TemporaryDirectory() as path:
        save_model(path, args.shape, dtype)
        systems = {name: SYSTEMS[name](path, dtype, args) for name in args.systems}
    rates: dict[str, list[float]] = {name: [] for name in systems}
    cpu_rates: dict[str, list[float]] = {name: [] for name in systems}
    for system in systems.values():
        measure(system, requests[: args.batch])  # warm up
    for index in range(args.rounds):
        for name, system in systems.items():
            wall, cpu = measure(system, requests)
            rates[name].append(wall)
            cpu_rates[name].append(cpu)
            print(f"round {index} {name}: {wall:.0f} tok/s, {cpu:.0f} per CPU second", flush=True)
    for system in systems.values():
        system.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "what": "tokens per second, same model and requests, interleaved rounds",
        "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
        "tokens_per_cpu_second": {name: round(statistics.median(values), 1) for name, values in cpu_rates.items()},
        "rounds": {name: [round(value, 1) for value in values] for name, values in rates.items()},
        # Median over rounds of the ratio within a round, so that other load on the machine counts on both sides.
        "embedded_over": {
            name: round(statistics.median(a / b for a, b in zip(rates["embedded"], values, strict=True)), 2)
            for name, values in rates.items()
            if "embedded" in rates
        },
        "workload": {
            "shape": args.shape,
            "dtype": str(dtype),
            "requests": args.requests,
            "concurrent": args.batch,
            "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
            "output_tokens": sum(new for _, new in requests),
        },
        "attention": {name: system.model.config._attn_implementation for name, system in systems.items()},
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": torch.get_num_threads(),
        **describe("torch", "transformers"),
    }
    print(result["tokens_per_second"], result["tokens_per_cpu_second"], result["embedded_over"])
    if not args.no_result:
        print(write_result(f"engine-{args.device}", result))


if __name__ == "__main__":
    main()
