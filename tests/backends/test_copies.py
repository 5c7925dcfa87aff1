"""Weights beside the policy's: a reference that follows, those that were sent, a teacher; what is not trained."""

import pytest
import torch
from torch import nn

from slime.backends.common.host_memory import HostCopy
from slime.backends.common.sent_weights import SentWeights
from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.backends.fsdp_utils.trainable import select_trainable
from slime.training.rollout_data import RankData
from tests.backends.trainers import (
    make_trainer,
    parameters_of,
    rollout_batch,
    rollout_parts,
    run_world,
    train_rollout,
    trainer_args,
)
from tests.tiny_model import save_tiny_model

KL = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3")


def rank_data(trainer, seed, **columns) -> RankData:
    batch = rollout_batch(seed) | columns
    return RankData(rollout_parts(trainer.args, batch, trainer.world_size)[trainer.rank])


def following_reference(make, model_dir, root):
    """KL of each rollout's first and only step, and the state after two rollouts, straight and resumed in between."""
    flags = (*KL, "--ref-update-interval", "1")
    straight = make(trainer_args(model_dir, *flags), with_ref=True)
    kl = [train_rollout(straight, rollout_id)["train/kl_loss"] for rollout_id in range(2)]
    train_rollout(straight, 2)

    first = make(trainer_args(model_dir, *flags, "--save", str(root / "follow")), with_ref=True)
    train_rollout(first, 0)
    train_rollout(first, 1)
    first.save_model(1)
    resumed = make(trainer_args(model_dir, *flags, "--load", str(root / "follow")), with_ref=True)
    kl.append(train_rollout(resumed, 2)["train/kl_loss"])
    fixed = make(trainer_args(model_dir, *KL), with_ref=True)
    kl += [train_rollout(fixed, rollout_id)["train/kl_loss"] for rollout_id in range(2)]
    return kl, parameters_of(straight), parameters_of(resumed)


def old_actor(make, model_dir):
    """Old log-probs of a rollout that the weights before the last update generated; and of one of the current ones."""
    trainer = make(trainer_args(model_dir, "--keep-old-actor", "--num-steps-per-rollout", "2"))
    before = trainer._log_probs(rank_data(trainer, 1))[0]
    trainer._sent.remember(1, 0)
    train_rollout(trainer, 0)
    trainer._sent.remember(2, trainer.optimizer.steps_done)
    current = trainer._log_probs(rank_data(trainer, 1))[0]
    out = []
    for version, expected in ((2, current), (1, before)):
        data = rank_data(trainer, 1, weight_version=[version] * 8)
        weights = parameters_of(trainer)
        trainer._prepare(data, trainer._old_policy(data))
        same = all(torch.equal(weights[name], value) for name, value in parameters_of(trainer).items())
        equal = all(torch.equal(got, want) for got, want in zip(data["log_probs"], expected, strict=True))
        out.append((same, equal))
    different = any(not torch.equal(a, b) for a, b in zip(before, current, strict=True))
    return out, different


def distilled(make, model_dir, teacher_dir):
    """Teacher's log-probs and advantages by sample index."""
    flags = ("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", teacher_dir, "--opd-kl-coef", "0.5")
    trainer = make(trainer_args(model_dir, *flags))
    data = rank_data(trainer, 3)
    trainer._prepare(data, None)
    keys = ("teacher_log_probs", "log_probs", "advantages")
    return {i: [data[key][n] for key in keys] for n, i in enumerate(data["sample_indices"])}


def partly_trained(make, model_dir):
    """Names of the parameters that a step moved."""
    flags = ("--only-train-params-name-list", r"layers\.1\.", "--freeze-params-name-list", r"norm\.weight$")
    trainer = make(trainer_args(model_dir, *flags))
    before = parameters_of(trainer)
    train_rollout(trainer, 0)
    return {name for name, value in parameters_of(trainer).items() if not torch.equal(value, before[name])}


def first_steps_again(make, model_dir):
    """Adam's step counts at the end of two rollouts, with and without --reset-optimizer-states."""
    counts = []
    for flags in ((), ("--reset-optimizer-states",)):
        trainer = make(trainer_args(model_dir, *flags))
        train_rollout(trainer, 0)
        train_rollout(trainer, 1)
        counts.append(float(next(iter(trainer.optimizer.adam.state.values()))["step"]))
    return counts


def everything(rank, world_size, port, model_dir, teacher_dir, root):
    def make(args, **init):
        return make_trainer(FSDPTrainRayActor, args, rank, world_size, port, **init)

    out = {
        "following": following_reference(make, model_dir, root),
        "old actor": old_actor(make, model_dir),
        "distilled": distilled(make, model_dir, teacher_dir),
        "moved": partly_trained(make, model_dir),
        "steps": first_steps_again(make, model_dir),
    }
    torch.distributed.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("teacher"))
    save_tiny_model(path, seed=5, hidden_size=32, num_hidden_layers=1)
    return path


@pytest.fixture(scope="module")
def results(tiny_model_dir, teacher_dir, tmp_path_factory):
    return run_world(everything, 2, tiny_model_dir, teacher_dir, tmp_path_factory.mktemp("copies"))


@pytest.mark.integration
def test_the_reference_follows_and_is_resumed(results):
    for result in results:
        (first, second, third, *fixed), straight, resumed = result["following"]
        assert (first, second, third) == (0, 0, 0)  # each rollout has one step, from where the reference stands
        assert fixed[0] == 0 and fixed[1] > 0
        assert all(torch.equal(resumed[name], value) for name, value in straight.items())


@pytest.mark.integration
def test_old_log_probs_are_those_of_the_weights_that_generated(results):
    assert any(result["old actor"][1] for result in results)
    for result in results:
        assert result["old actor"][0] == [(True, True), (True, True)]


@pytest.mark.integration
def test_teacher(results, tiny_model_dir, teacher_dir):
    from transformers import AutoModelForCausalLM

    batch = rollout_batch(3)
    found = {index: values for result in results for index, values in result["distilled"].items()}
    assert sorted(found) == batch["sample_indices"]
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (teacher_dir, tiny_model_dir)]
    for i, index in enumerate(batch["sample_indices"]):
        tokens, length = torch.tensor(batch["tokens"][i]), batch["response_lengths"][i]
        with torch.no_grad():
            teacher, policy = (
                m(tokens[None]).logits[0, -length - 1 : -1].log_softmax(-1).gather(-1, tokens[-length:, None])[:, 0]
                for m in models
            )
        mask = torch.tensor(batch["loss_masks"][i])
        got_teacher, got_policy, advantages = found[index]
        assert torch.allclose(got_teacher, teacher, atol=1e-5) and torch.allclose(got_policy, policy, atol=1e-5)
        expected = batch["rewards"][i] - 0.5 * (policy - teacher) * mask
        assert torch.allclose(advantages, expected, atol=1e-5)


@pytest.mark.integration
def test_only_what_is_named_moves(results):
    for result in results:
        assert result["moved"] and all("layers.1." in name and "norm" not in name for name in result["moved"])
        assert "model.layers.1.mlp.up_proj.weight" in result["moved"]


@pytest.mark.integration
def test_optimizer_states_are_reset(results):
    assert all(result["steps"] == [2, 1] for result in results)


@pytest.mark.unit
def test_an_expression_without_a_match_is_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"--freeze-params-name-list: 'lm_head' matches none of the 4 .*0\.weight"):
        select_trainable(dict(model.named_parameters()), None, ["lm_head"])
    with pytest.raises(ValueError, match="leave no parameter"):
        select_trainable(dict(model.named_parameters()), ["0"], ["weight", "bias"])
    select_trainable(dict(model.named_parameters()), [r"^0\."], None)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]


@pytest.mark.unit
def test_versions_that_are_kept():
    weight = torch.zeros(1)
    sent = SentWeights(HostCopy([weight]))
    for version in (4, 5, 6, 6):  # an engine that came back gets the last one again
        weight.fill_(version)
        sent.remember(version, steps_done=10 * version)

    def held(version, steps_done=0):
        copy = sent.of_version(version, steps_done)
        if copy is not None:
            copy.load()
            return weight.item()

    assert [held(version) for version in (4, 5, 6, 7)] == [5, 5, 6, 6]
    assert held(6, steps_done=60) is None and held(5, steps_done=60) == 5
