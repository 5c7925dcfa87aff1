"""Weights beside the policy's on Megatron ranks: a moving reference, those that were sent, a teacher; what is trained;
users' functions around it. Numbers are those of the FSDP trainer."""

import pytest
import torch
import torch.distributed as dist

from slime.training.rollout_data import RankData
from tests.backends.megatron.test_exactness import READABLE, gradients_of
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import rollout_batch, rollout_parts, run_world, trainer_args
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.integration

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
KL = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3")
CUSTOM = ("--loss-type", "custom_loss", "--custom-loss-function-path", f"{__name__}.weighted_likelihood")
TRAINED = ("--only-train-params-name-list", r"layers\.1\.", "--freeze-params-name-list", r"norm\.weight$")
CALLS: list = []


def weighted_likelihood(args, batch, logits, sum_of_sample_mean):
    """-sum A log p and the mean square of the logits, from the logits of whole packed rows."""
    row = torch.cat(batch["tokens"]).to(logits.device)
    log_probs = logits[0, : len(row) - 1].log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1)
    ends = torch.tensor(batch["total_lengths"]).cumsum(0).tolist()
    parts = [log_probs[end - count - 1 : end - 1] for end, count in zip(ends, batch["response_lengths"], strict=True)]
    loss = -sum_of_sample_mean(torch.cat(parts) * torch.cat(batch["advantages"]))
    size = logits[0, : len(row)].square().mean() * 1e-2
    return loss + size, {"likelihood": loss, "width": torch.tensor(float(logits.shape[-1]))}


def after_init(args):
    from megatron.core import parallel_state

    CALLS.append(("init", parallel_state.get_tensor_model_parallel_world_size()))


def before_log_prob(args, model, store_prefix):
    CALLS.append(("log_prob", len(model), store_prefix))


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    lr = opt_param_scheduler.lr(step_id)
    CALLS.append(("train_step", rollout_id, step_id, len(model), len(optimizer.param_groups) > 0, lr))


def provider(pre_process, post_process, vp_stage=None, build=None, config=None):
    CALLS.append(("provider", pre_process, post_process, vp_stage, config.num_layers))
    return build(pre_process, post_process, vp_stage)


def stock_provider(pre_process, post_process, vp_stage=None):
    return torch.nn.Linear(2, 2)


HOOKS = {
    "custom-megatron-init": "after_init",
    "custom-megatron-before-log-prob-hook": "before_log_prob",
    "custom-megatron-before-train-step-hook": "before_train_step",
    "custom-model-provider": "provider",
}


def rank_data(trainer, seed, **columns) -> RankData:
    batch = rollout_batch(seed) | columns
    return RankData(rollout_parts(trainer.args, batch, dist.get_world_size(trainer.dp_group))[trainer.dp_rank])


def following_reference(make, root):
    """KL of each rollout's only step, and the state after three rollouts, straight and resumed in another layout."""
    flags = (*KL, "--ref-update-interval", "1", "--num-steps-per-rollout", "1")
    straight = make(TP2SP, *flags, with_ref=True)
    kl = [train_rollout(straight, rollout_id)["train/kl_loss"] for rollout_id in range(3)]
    expected = parameters_of(straight)
    first = make(PP2, *flags, "--save", str(root / "follow"), with_ref=True)
    for rollout_id in range(2):
        train_rollout(first, rollout_id)
    first.save_model(1)
    resumed = make(TP2SP, *flags, "--load", str(root / "follow"), with_ref=True)
    kl.append(train_rollout(resumed, 2)["train/kl_loss"])
    return kl, expected, parameters_of(resumed)


def old_actor(make):
    """Whether old log-probs of a rollout of earlier weights are those of these weights, which then are put back."""
    trainer = make(TP2SP, "--keep-old-actor", "--num-steps-per-rollout", "2")
    before = trainer._log_probs(rank_data(trainer, 1))[0]
    trainer._sent.remember(1, 0)
    train_rollout(trainer, 0)
    trainer._sent.remember(2, trainer.optimizer.steps_done)
    current = trainer._log_probs(rank_data(trainer, 1))[0]
    out = [any(not torch.equal(a, b) for a, b in zip(before, current, strict=True))]
    for version, expected in ((2, current), (1, before)):
        data = rank_data(trainer, 1, weight_version=[version] * 8)
        weights = {name: value.clone() for name, value in parameters_of(trainer).items()}
        trainer._prepare(data, trainer._old_policy(data))
        out.append(all(torch.equal(weights[name], value) for name, value in parameters_of(trainer).items()))
        out.append(all(torch.equal(got, want) for got, want in zip(data["log_probs"], expected, strict=True)))
    return out


def distilled(make, layout, teacher_dir, *further):
    flags = ("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", teacher_dir, "--opd-kl-coef", "0.5")
    trainer = make(layout, *flags, *further)
    data = rank_data(trainer, 3)
    trainer._prepare(data, None)
    keys = ("teacher_log_probs", "advantages")
    return {i: [data[key][n] for key in keys] for n, i in enumerate(data["sample_indices"])}


def by_an_earlier_self(make, root):
    """Log-probs of a policy after each of its rollouts, and of it as a teacher from its checkpoints."""
    trainer = make({}, "--save", f"{root}/teacher")
    wanted = []
    for rollout_id in range(2):
        train_rollout(trainer, rollout_id)
        trainer.save_model(rollout_id)
        data = rank_data(trainer, 3)
        wanted.append(dict(zip(data["sample_indices"], trainer._log_probs(data)[0], strict=True)))
    got = [distilled(make, TP2SP, f"{root}/teacher", *flags) for flags in (("--opd-teacher-ckpt-step", "0"), ())]
    return wanted, [{i: values[0] for i, values in one.items()} for one in got]


def one_step(make, layout, *flags):
    trainer = make(layout, *READABLE, *flags)
    before = {name: value.clone() for name, value in parameters_of(trainer).items()}
    metrics = train_rollout(trainer, 0)
    return metrics, gradients_of(before, parameters_of(trainer))


def everything(rank, world_size, port, model_dir, teacher_dir, root):
    started = []

    def make(layout, *flags, **init):
        if started:
            stop_trainer()
        backend = ("--train-backend", "megatron", "--dtype", "float32")
        changes = {"data_pad_size_multiplier": 4, "make_vocab_size_divisible_by": 12, **layout}
        args = trainer_args(model_dir, *backend, *flags, **changes)
        started.append(layout)
        return start_trainer(args, rank, world_size, port, **init)

    out = {
        "following": following_reference(make, root),
        "old actor": old_actor(make),
        "distilled": [distilled(make, layout, teacher_dir) for layout in (TP2SP, PP2)],
        "earlier self": by_an_earlier_self(make, root),
        "trained": [one_step(make, layout, *TRAINED)[1] for layout in (TP2SP, PP2)],
        "custom": [one_step(make, layout, *CUSTOM) for layout in (TP2SP, PP2)],
    }
    CALLS.clear()
    paths = [word for hook, name in HOOKS.items() for word in (f"--{hook}-path", f"{__name__}.{name}")]
    train_rollout(make(PP2, *paths, *KL, "--num-steps-per-rollout", "2", with_ref=True), 0)
    out["calls"] = list(CALLS)
    trainer = make({}, "--reset-optimizer-states")
    train_rollout(trainer, 0)
    moments = [tensor.data_ptr() for tensor in trainer.optimizer.state_tensors()]
    train_rollout(trainer, 1)
    out["moments stay"] = moments == [tensor.data_ptr() for tensor in trainer.optimizer.state_tensors()]
    out["steps"] = {float(state["step"]) for o in trainer.optimizer.torch_optimizers() for state in o.state.values()}
    out["errors"] = []
    for flags in (
        ("--freeze-params-name-list", r"q_proj\.weight"),
        ("--freeze-params-name-list", "no_such_name"),
        ("--custom-model-provider-path", f"{__name__}.stock_provider"),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            make({}, *flags)
        out["errors"].append(str(error.value))
    stop_trainer()
    dist.destroy_process_group()
    return out


def fsdp(rank, world_size, port, model_dir):
    from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
    from tests.backends import trainers

    out = {}
    for name, flags in {"trained": TRAINED, "custom": CUSTOM}.items():
        args = trainer_args(model_dir, *READABLE, *flags)
        trainer = trainers.make_trainer(FSDPTrainRayActor, args, rank, world_size, port)
        before = {key: value.clone() for key, value in trainers.parameters_of(trainer).items()}
        metrics = trainers.train_rollout(trainer, 0)
        out[name] = (metrics, gradients_of(before, trainers.parameters_of(trainer)))
    return out


@pytest.fixture(scope="module")
def dirs(tmp_path_factory):
    model, teacher = str(tmp_path_factory.mktemp("model")), str(tmp_path_factory.mktemp("teacher"))
    save_tiny_model(model)
    save_tiny_model(teacher, seed=5, hidden_size=32, num_hidden_layers=4)
    return model, teacher


@pytest.fixture(scope="module")
def results(dirs, tmp_path_factory):
    return run_world(everything, 2, *dirs, tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def expected(dirs):
    return run_world(fsdp, 1, dirs[0])[0]


def same_gradients(found, wanted):
    largest = max(g.abs().max().item() for g in wanted.values())
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max().item() < 1e-5 * largest, name


def test_the_reference_follows_and_is_resumed_in_another_layout(results):
    for result in results:
        kl, straight, resumed = result["following"]
        assert kl == [0, 0, 0, 0]  # each rollout has one step, from where the reference stands
        for name, value in straight.items():
            assert (resumed[name] - value).abs().max() < 2e-6, name


def test_old_log_probs_are_those_of_the_weights_that_generated(results):
    assert all(result["old actor"] == [True] * 5 for result in results)


def test_teacher(results, dirs):
    from transformers import AutoModelForCausalLM

    batch = rollout_batch(3)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in reversed(dirs)]
    for i, index in enumerate(batch["sample_indices"]):
        tokens, length = torch.tensor(batch["tokens"][i]), batch["response_lengths"][i]
        with torch.no_grad():
            teacher, policy = (
                m(tokens[None]).logits[0, -length - 1 : -1].log_softmax(-1).gather(-1, tokens[-length:, None])[:, 0]
                for m in models
            )
        advantages = batch["rewards"][i] - 0.5 * (policy - teacher) * torch.tensor(batch["loss_masks"][i])
        for layouts in (result["distilled"] for result in results):
            for found in layouts:
                assert torch.allclose(found[index][0], teacher, atol=1e-5)
                assert torch.allclose(found[index][1], advantages, atol=1e-5)


def test_a_teacher_may_be_an_earlier_self(results):
    for result in results:
        wanted, got = result["earlier self"]
        assert not torch.allclose(*(torch.cat(list(of_step.values())) for of_step in wanted), atol=1e-4)
        for of_policy, of_teacher in zip(wanted, got, strict=True):
            assert of_policy
            for index, log_probs in of_policy.items():
                assert torch.allclose(of_teacher[index], log_probs, atol=1e-5)


def test_only_what_is_named_is_trained(results, expected):
    wanted = expected["trained"][1]
    assert {name for name, gradient in wanted.items() if gradient.any()} < set(wanted)
    for result in results:
        for gradients in result["trained"]:
            same_gradients(gradients, wanted)


def test_custom_loss_over_a_cut_vocabulary_equals_fsdp(results, expected):
    metrics, gradients = expected["custom"]
    for result in results:
        for ours, theirs in result["custom"]:
            for key in ("loss", "likelihood", "width"):
                assert ours[f"train/{key}"] == pytest.approx(metrics[f"train/{key}"], rel=1e-5), key
            same_gradients(theirs, gradients)


def test_users_functions_are_called(results):
    for rank, result in enumerate(results):
        assert result["calls"] == [
            ("init", 1),
            ("provider", rank == 0, rank == 1, None, 2),
            ("log_prob", 1, "ref_"),
            ("log_prob", 1, ""),
            ("train_step", 0, 0, 1, True, 1e-3),
            ("train_step", 0, 1, 1, True, 1e-3),
        ]


def test_optimizer_states_are_reset(results):
    """In place: otherwise a GPU would keep the old ones beside the new, and neither be offloaded."""
    assert all(result["steps"] == {1.0} and result["moments stay"] for result in results)


def test_errors_name_what_is_wrong(results):
    for result in results:
        partly, unknown, provided = result["errors"]
        assert "k_proj.weight" in partly and "linear_qkv.weight" in partly
        assert "--freeze-params-name-list: 'no_such_name' matches none" in unknown
        assert "returned a Linear, not a PolicyGPT" in provided
