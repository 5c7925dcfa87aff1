"""Mixture-of-experts models of transformers: trained as a plain implementation trains them, balance included."""

import pytest
import torch

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.modeling.attention import PackedSequences
from slime.modeling.hf import empty_causal_lm, load_causal_lm
from tests.backends.reference import ReferenceTrainer
from tests.backends.trainers import (
    make_trainer,
    parameters_of,
    rollout_batch,
    run_world,
    train_rollout,
    trainer_args,
)
from tests.tiny_model import save_tiny_moe

pytestmark = pytest.mark.integration

EXPERTS, TOP_K, COEFFICIENT = 4, 2, 0.5
# Balance is a matter of a micro-batch, so here each holds one sample. All samples have weight.
FLAGS = ("--num-steps-per-rollout", "2", "--moe-aux-loss-coeff", str(COEFFICIENT), "--ci-test")
VARIANTS = {"plain": (), "recomputed": ("--gradient-checkpointing",)}
SHARED = {"tokens of a sample on two ranks": ("--context-parallel-size", "2", "--actor-num-gpus-per-node", "2")}


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("moe"))
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    save_tiny_moe(path, seed=3, intermediate_size=64, norm_topk_prob=True, **sizes)
    return path


def run(rank, world_size, port, moe_dir):
    out = {}
    for name, flags in (VARIANTS if world_size == 1 else VARIANTS | SHARED).items():
        trainer = make_trainer(FSDPTrainRayActor, trainer_args(moe_dir, *FLAGS, *flags), rank, world_size, port)
        metrics = [train_rollout(trainer, rollout_id) for rollout_id in range(2)]
        out[name] = parameters_of(trainer), metrics
    torch.distributed.destroy_process_group()
    return out


class MoeReference(ReferenceTrainer):
    """With Switch Transformer's balance loss, written from its equations."""

    def __init__(self, args):
        from transformers import AutoModelForCausalLM

        super().__init__(args)
        self.model = AutoModelForCausalLM.from_pretrained(
            args.hf_checkpoint, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
        )
        self.params = dict(self.model.named_parameters())
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.params.items()}
        self.ref = self.model
        self.balance = []

    def _step(self, batch, samples, old):
        balance = torch.zeros((), dtype=torch.float64)
        for i in samples:
            if not sum(batch["loss_masks"][i]):
                continue
            routers = self.model(torch.tensor(batch["tokens"][i])[None], output_router_logits=True).router_logits
            for logits in routers:
                probs = logits.softmax(-1)
                chosen = torch.nn.functional.one_hot(probs.topk(TOP_K).indices, EXPERTS).double().mean((0, 1))
                balance = balance + EXPERTS * (chosen * probs.mean(0)).sum() / len(routers) / len(samples)
        self.balance.append(balance.item())
        (COEFFICIENT * balance).backward()
        return super()._step(batch, samples, old)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_and_balance_equal_the_reference(moe_dir, world_size):
    results = run_world(run, world_size, moe_dir)
    reference = MoeReference(trainer_args(moe_dir, *FLAGS))
    for seed in range(2):
        reference.train(rollout_batch(seed))
    expected = [sum(reference.balance[i : i + 2]) / 2 for i in (0, 2)]
    for result in results:
        for name, (parameters, metrics) in result.items():
            assert [m["train/moe_aux_loss"] for m in metrics] == pytest.approx(expected, rel=1e-4), name
            assert all(1 <= m["train/moe_max_load"] <= EXPERTS for m in metrics)
            assert parameters.keys() == reference.params.keys()
            for key, value in reference.params.items():
                error = (parameters[key].double() - value.detach()).abs().max().item()
                assert error < 2e-5, (name, key, error)


def test_experts_are_computed_by_grouped_products(moe_dir, monkeypatch):
    product, calls = torch.nn.functional.grouped_mm, []

    def counted(*args, **kwargs):
        calls.append(1)
        return product(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    model = load_causal_lm(moe_dir, torch.bfloat16)
    with torch.no_grad():
        model.base_model(
            input_ids=torch.arange(6)[None],
            position_ids=torch.arange(6)[None],
            attention_context=PackedSequences([6], "cpu"),
            use_cache=False,
        )
    assert len(calls) == 2 * model.config.num_hidden_layers
    assert empty_causal_lm(moe_dir, torch.bfloat16).config._experts_implementation == "grouped_mm"
