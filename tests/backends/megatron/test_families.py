"""Each family in Megatron is the model that transformers runs, and goes back to the checkpoint bit for bit."""

import pytest
import torch
import torch.distributed as dist

from tests.backends.megatron.families import CASES, WITH_DELTA_NETS, WITH_EXPERTS, save_family
from tests.backends.trainers import run_world

LENGTHS, RESPONSES = [7, 12, 1, 3], [3, 8, 0, 2]
LAYOUTS = {
    "TP1": {},
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2},
    "CP2": {"context": 2},
    "EP2": {"expert": 2},
    "EP2 TP2+SP": {"expert": 2, "tensor": 2, "expert_tensor": 1, "sequence_parallel": True},
    "ETP2 TP2+SP": {"expert_tensor": 2, "tensor": 2, "sequence_parallel": True},
}


def micro_batch():
    from slime.training.batch import MicroBatch

    tokens = torch.randint(0, 131, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    return MicroBatch(
        tokens=tokens,
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS]),
        cu_seqlens=torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        max_seqlen=max(LENGTHS),
        total_lengths=LENGTHS,
        response_lengths=RESPONSES,
        loss_masks=torch.ones(sum(RESPONSES)),
        denominators=torch.ones(len(LENGTHS)),
    )


def expected(path: str, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of the response tokens by transformers, one sequence after the other."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    batch, log_probs, entropy = micro_batch(), [], []
    for tokens, response in zip(batch.tokens.split(LENGTHS), RESPONSES, strict=True):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].double()
        rows = logits.log_softmax(-1)[len(tokens) - response - 1 : len(tokens) - 1]
        log_probs.append(rows.gather(-1, tokens[len(tokens) - response :, None]).squeeze(-1))
        entropy.append(-(rows.exp() * rows).sum(-1))
    return torch.cat(log_probs).detach(), torch.cat(entropy).detach()


def megatron(path: str, sizes, dtype):
    """(log-probs, entropy) on the last pipeline stage or None; weights gathered back under checkpoint names."""
    from slime.backends.megatron_utils import parallel
    from slime.backends.megatron_utils.architecture import read_architecture
    from slime.backends.megatron_utils.forward import Forward
    from slime.backends.megatron_utils.model_config import transformer_config
    from slime.backends.megatron_utils.model_provider import build_model
    from slime.backends.megatron_utils.rotary import Rotary
    from slime.backends.megatron_utils.weights import MegatronWeights, load_hf

    cpu = torch.device("cpu")
    architecture = read_architecture(path)
    config = transformer_config(architecture, sizes, dtype, cpu)
    model = build_model(architecture, config, divisible_by=12)
    load_hf([model], architecture, path)
    rotary = None if architecture.get("multi_latent_attention") else Rotary(architecture.rope, cpu)
    forward = Forward([model], config, parallel.context_parallel(), rotary, chunk_size=5)

    def result(index, batch, log_probs, entropy):
        return torch.zeros(()), (log_probs, entropy)

    with torch.no_grad():
        out = forward([micro_batch()] * 2, result, backward=False, with_entropy=True)
    weights = MegatronWeights([model], architecture, dtype, cpu)
    specs = weights.tensor_specs()
    back = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    weights.gather(specs, back)
    return (out[1] if out else None), {spec.name: tensor for spec, tensor in zip(specs, back, strict=True)}


def fits(case: str, layout: str) -> bool:
    """Expert layouts are for models with experts, and those want sequence parallelism beside tensor parallelism; delta
    nets need whole sequences."""
    if case in WITH_DELTA_NETS and "CP" in layout:
        return False
    return layout != "TP2" if case in WITH_EXPERTS else not layout.startswith("E")


def compare(rank, world_size, port, cases):
    """{(case, layout): (greatest error, parameters that differ)} for all layouts that fit the world."""
    from slime.backends.megatron_utils import compat

    compat.install()
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    from slime.backends.megatron_utils import parallel
    from slime.backends.megatron_utils.hf_files import HFTensors

    results = {}
    for name, layout in LAYOUTS.items():
        if (1 if name == "TP1" else 2) != world_size:
            continue
        sizes = parallel.ParallelSizes(**layout)
        parallel.init_parallel(sizes, seed=1, timeout_minutes=2)
        for case, (path, reference) in cases.items():
            if not fits(case, name):
                continue
            out, weights = megatron(path, sizes, torch.float32)
            error = 0.0
            if out is not None:
                error = max((a - b).abs().max().item() for a, b in zip(out, reference, strict=True))
            with HFTensors(path) as checkpoint:
                names = set(checkpoint.names())
                wrong = [n for n in names & set(weights) if not torch.equal(checkpoint[n], weights[n])]
                wrong += sorted(names ^ set(weights))
            results[case, name] = (error, wrong)
        parallel.destroy_parallel()
    dist.destroy_process_group()
    return results, dict(compat.hits)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    cases = {}
    for case in CASES:
        path = str(root / case.replace(" ", "-"))
        save_family(case, path)
        cases[case] = (path, expected(path, torch.float32))
    one = run_world(compare, 1, cases)
    two = run_world(compare, 2, cases)
    return [r[0] for r in one + two]


@pytest.mark.integration
@pytest.mark.parametrize("case, layout", [(c, n) for c in CASES for n in LAYOUTS if fits(c, n)])
def test_equals_transformers(results, case, layout):
    found = [rank[case, layout] for rank in results if (case, layout) in rank]
    assert max(error for error, _ in found) < 1e-5
    assert all(not wrong for _, wrong in found), found[0][1]
