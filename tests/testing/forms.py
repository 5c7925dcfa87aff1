"""Hooks in every form that they have been written in, and broken ones."""

import torch
from aiohttp import web

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import generate
from slime.rollout.sglang_rollout import generate_rollout as default_rollout
from slime.utils.misc import flatten
from slime.utils.types import Sample

# rollout and evaluation


def rollout_now(args, rollout_id, data_source, evaluation=False):
    return default_rollout(args, rollout_id, data_source, evaluation)


def rollout_legacy_list(args, rollout_id, data_source, evaluation=False):
    return default_rollout(args, rollout_id, data_source).samples


def rollout_without_evaluation(args, rollout_id, data_source):
    return RolloutFnTrainOutput(samples=default_rollout(args, rollout_id, data_source).samples)


def rollout_too_few(args, rollout_id, data_source, evaluation=False):
    return default_rollout(args, rollout_id, data_source).samples[:1]


def rollout_raises(args, rollout_id, data_source, evaluation=False):
    raise KeyError("no")


def eval_dict(args, rollout_id, data_source, evaluation=False):
    return {"a": {"rewards": [1.0], "truncated": [False], "samples": [Sample(reward=1.0)]}}


def eval_output(args, rollout_id, data_source, evaluation=False):
    return RolloutFnEvalOutput(data=eval_dict(args, rollout_id, data_source), metrics={"extra": 1})


def eval_missing_rewards(args, rollout_id, data_source, evaluation=False):
    return {"a": {"rewards": [1.0, 2.0], "samples": [Sample(reward=1.0)]}}


# generate


async def generate_three(args, sample, sampling_params):
    return await generate(args, sample, sampling_params)


async def generate_with_evaluation(args, sample, sampling_params, evaluation=False):
    assert isinstance(evaluation, bool)
    return await generate(args, sample, sampling_params, evaluation=evaluation)


async def generate_list(args, sample, sampling_params):
    whole = await generate(args, sample, sampling_params)
    return [whole.clone(), whole]


async def generate_pending(args, sample, sampling_params):
    sample.tokens, sample.response_length = [1, 2], 1
    return sample


async def generate_nothing(args, sample, sampling_params):
    return None


async def generate_changes_params(args, sample, sampling_params):
    sampling_params["stop"] = ["x"]
    from slime.rollout.generate_state import GenerateState

    GenerateState(args).sampling_params["temperature"] = 0.1
    return await generate(args, sample, sampling_params)


def sample_hook_plain(args, sample):
    sample.metadata["seen"] = True


async def sample_hook_keywords(args, sample, *, rollout_id=None, evaluation=False):
    return sample


def sample_hook_raises(args, sample, **kwargs):
    raise RuntimeError("hook broke")


def sample_hook_text(args, sample):
    return "x"


# rewards


async def rm_single(args, sample, **kwargs):
    return 1.0


async def rm_without_kwargs(args, sample):
    return {"score": 0.5}


def rm_sync(args, sample, **kwargs):
    return 0


async def rm_group(args, samples, **kwargs):
    return [0.0] * len(samples)


async def rm_none(args, sample, **kwargs):
    return None


async def rm_group_short(args, samples, **kwargs):
    return [0.0]


def post_process(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, [r - 0.5 for r in raw]


def post_process_short(args, samples):
    return [1.0], [1.0]


# filters


def filter_bool(args, samples):
    return True


def filter_output(args, samples, **kwargs):
    return DynamicFilterOutput(keep=len({s.reward for s in samples}) > 1, reason="same")


def filter_none(args, samples, **kwargs):
    return None


def filter_changes(args, samples, **kwargs):
    samples[0].reward = 3.0
    return True


def buffer_newest(args, rollout_id, buffer, num_samples):
    taken = buffer[-num_samples:]
    del buffer[-num_samples:]
    return taken


def buffer_keeps(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]


def buffer_all(args, rollout_id, buffer, num_samples):
    return list(buffer)


def sample_filter(args, groups):
    for group in groups:
        group[-1].remove_sample = group[-1].truncated


def sample_filter_text(args, groups):
    groups[0][0].remove_sample = "yes"


def all_samples(args, all_groups, data_source):
    data_source.update_metadata({"seen": sum(1 for _ in flatten(all_groups))})


def all_samples_old(args, all_groups):
    return None


class Source(RolloutDataSourceWithBuffer):
    pass


class ForgetfulSource(RolloutDataSourceWithBuffer):
    def load(self, rollout_id=None):
        return None


# train data and logging


def convert(args, samples):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [0.0 for _ in samples],
        "raw_reward": [0.0 for _ in samples],
    }


def convert_without_tokens(args, samples):
    return {"rewards": []}


def log_rollout(rollout_id, args, samples, extra_metrics, rollout_time):
    return True


def log_rollout_number(rollout_id, args, samples, extra_metrics, rollout_time):
    return 7


def log_rollout_raises(rollout_id, args, samples, extra_metrics, rollout_time):
    raise KeyError("tracker")


def log_rollout_changes(rollout_id, args, samples, extra_metrics, rollout_time):
    samples[0].reward = 0.5


def log_eval(rollout_id, args, data, extra_metrics):
    return False


# the trainer's


def postprocess_one(args):
    return None


def postprocess_two(args, rollout_data):
    rollout_data.set_flat("advantages", [a * 2 for a in rollout_data["advantages"]])


def postprocess_three(args, rollout_id, rollout_data):
    assert rollout_id == 0 and "advantages" in rollout_data


def postprocess_short(args, rollout_id, rollout_data):
    rollout_data.set_flat("advantages", [a[:1] for a in rollout_data["advantages"]])


def advantage(args, rollout_data):
    ones = [torch.ones(int(n)) for n in rollout_data["response_lengths"]]
    rollout_data["advantages"], rollout_data["returns"] = ones, ones


def advantage_without_returns(args, rollout_data):
    rollout_data["advantages"] = [torch.ones(int(n)) for n in rollout_data["response_lengths"]]


def loss(args, batch, logits, sum_of_sample_mean):
    value = torch.log_softmax(logits[0].float(), -1)[:, 0].mean()
    return -value, {"value": value.detach()}


def loss_vector(args, batch, logits, sum_of_sample_mean):
    return logits[0, :, 0], {}


def tis_short(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    return pg_loss[:1], loss_masks, {}


def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: (values * torch.cat(loss_masks)).sum()


def reducer_raises(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    raise ValueError("no reducer")


def megatron_init(args):
    assert args.custom_megatron_init_path


def before_log_prob(args, model, store_prefix):
    assert len(model) == 1 and store_prefix in ("", "ref_")


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    assert opt_param_scheduler.lr(step_id) == optimizer.param_groups[0]["lr"]


def provider(pre_process, post_process, vp_stage=None, build=None, config=None):
    assert config.num_layers == 2
    return build(pre_process, post_process, vp_stage)


def stock_provider(pre_process, post_process, vp_stage=None):
    return torch.nn.Linear(2, 2)


# the router's and the weights'


class Middleware:
    def __init__(self, app, *, router):
        self.router = router

    async def dispatch(self, request, call_next):
        return await call_next(request)


class AsgiMiddleware:
    def __init__(self, app, *, router):
        self.app = app

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)


class DroppingMiddleware(Middleware):
    async def dispatch(self, request, call_next):
        await call_next(request)
        return web.Response(status=204)


class RaisingMiddleware(Middleware):
    async def dispatch(self, request, call_next):
        raise KeyError("nothing")


def post_write(args, version_dir, rollout_engines):
    assert version_dir.endswith("weight_v000001") and len(rollout_engines) == 1


def post_write_raises(args, version_dir, rollout_engines):
    raise OSError("no space")
