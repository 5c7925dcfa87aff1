"""Fields of Megatron's configuration classes as flags: read from source, checked, and applied."""

from argparse import Namespace
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist

from slime.arguments.parser import MEGATRON_FLAGS
from slime.arguments.problems import Problems
from slime.arguments.validation import megatron as validation
from slime.backends.megatron_utils.arguments import config_fields, given_fields, layer_pattern, package_dir
from slime.backends.megatron_utils.fields import ALIASES, ARCHITECTURE, OWNED, REFUSED
from slime.backends.megatron_utils.settings import config_overrides, ddp_options, optimizer_options
from tests.backends.megatron.families import save_family
from tests.backends.megatron.published import CONFIGS
from tests.backends.megatron.test_architecture import problems
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import run_world, trainer_args
from tests.tiny_model import save_tiny_model


@pytest.mark.unit
def test_every_field_that_can_be_typed_is_a_flag():
    """What the syntax tree gives is what the imported classes have."""
    import dataclasses

    from slime.backends.megatron_utils import compat

    compat.install()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    real = {
        field.name: str(field.type)
        for kind in (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
        for field in dataclasses.fields(kind)
    }
    read = set(config_fields())
    assert read <= set(real)
    typeable = {name for name, kind in real.items() if "Callable" not in kind and not name.startswith("_")}
    assert typeable - read == {"attention_backend", "quant_recipe"}
    if version("megatron-core") == "0.16.1":  # later releases drop some
        assert {*ALIASES, *ARCHITECTURE, *OWNED, *REFUSED} - set(real) == set()


@pytest.mark.unit
@pytest.mark.parametrize(
    "raw, value",
    [("2", 2), ("[0]*3+[1]*2", [0, 0, 0, 1, 1]), ("([0, 1] * 2)", [0, 1, 0, 1]), ([1, 0], [1, 0])],
)
def test_layer_pattern(raw, value):
    assert layer_pattern(raw) == value


@pytest.mark.unit
@pytest.mark.parametrize("raw", ["__import__('os')", "[0]*99999", "[0]*[1]", "x", "2.5", "[0"])
def test_layer_pattern_evaluates_nothing_else(raw):
    with pytest.raises(ValueError, match="whole number or a list"):
        layer_pattern(raw)


@pytest.mark.unit
@pytest.mark.parametrize(
    "flags, named",
    [
        ("--moe-layer-freq [0]*1+[1]*47", "--moe-layer-freq 0 1 1"),
        ("--rotary-interleaved", "--rotary-interleaved True: contradicts --hf-checkpoint"),
        ("--norm-epsilon 1e-5", "--norm-epsilon 1e-05: contradicts --hf-checkpoint"),
        ("--window-size 128 0", "--window-size 128 0: contradicts --hf-checkpoint"),
        ("--rope-fusion", "needs Transformer Engine"),
        ("--no-decoupled-weight-decay", "--no-decoupled-weight-decay: not available yet: only AdamW is built"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: must be greater than 0"),
        ("--fp8-format hybrid", "--fp8-format hybrid: not available yet: needs Transformer Engine"),
        ("--exp-avg-dtype bf16", "--exp-avg-dtype bf16: needs --use-precision-aware-optimizer"),
        ("--use-precision-aware-optimizer --exp-avg-dtype fp8", "they need scales; use bf16"),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --optimizer-cpu-offload", "stay in fp32"),
        (
            "--use-precision-aware-optimizer --exp-avg-sq-dtype bf16 --adam-beta2 0.99",
            "--exp-avg-sq-dtype bf16: needs --adam-beta2 <= 0.98: with 0.99 the moment would stop as far as 39%",
        ),
        ("--main-grads-dtype bf16", "gradients are summed, and parameters kept, in fp32"),
        ("--attention-dropout 0.1", "--attention-dropout 0.1: must be 0"),
        ("--attention-backend fused", "variable-length attention"),
        ("--moe-token-dispatcher-type flex", "needs DeepEP"),
        ("--moe-token-dispatcher-type flexx", "must be one of allgather, alltoall, flex"),
        ("--calculate-per-token-los", "did you mean --calculate-per-token-loss?"),
        ("--ddp-average-in-collective", "slime sets this itself"),
        ("--params-dtype bf16", "use --dtype"),
        ("--moe-router-nonsense 3", "unknown flag"),
        ("--moe-router-load-balancing-type sinkhorn", "would choose other experts"),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", "contradicts --moe-aux-loss-coeff 0.1"),
        ("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1", "is not built"),
        ("--padded-vocab-size 151936", "must be 152064"),
    ],
)
def test_what_contradicts_or_cannot_work_is_named(tmp_path, flags, named):
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--make-vocab-size-divisible-by", "192")
    assert named in problems(tmp_path, CONFIGS["qwen3-30B-A3B"], *layout, *flags.split())


@pytest.mark.unit
def test_flags_of_existing_launch_scripts_are_right(tmp_path):
    flags = (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --expert-model-parallel-"
        "size 4 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --attention-dropout "
        "0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 "
        "--attention-backend flash --moe-token-dispatcher-type allgather --moe-router-dtype fp32 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 "
        "--moe-layer-freq [1]*48 --no-bias-swiglu-fusion --ddp-bucket-size 1000000 --overlap-grad-reduce "
        "--padded-vocab-size 151936 --optimizer-cpu-offload --no-bias-dropout-fusion --no-rope-fusion "
        "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --moe-grouped-gemm"
    )
    words = [*flags.split(), "--make-vocab-size-divisible-by", "64"]
    assert problems(tmp_path, CONFIGS["qwen3-30B-A3B"], *words) == ""


@pytest.mark.unit
def test_given_fields_reach_their_classes(tmp_path):
    save_tiny_model(str(tmp_path))
    flags = (
        "--train-backend megatron --no-bias-swiglu-fusion --bucket-size 77 --apply-wd-to-qk-layernorm "
        "--no-moe-grouped-gemm"
    )
    args = trainer_args(str(tmp_path), *flags.split(), "--recompute-modules", "mlp", "core_attn")
    overrides = config_overrides(args)
    assert overrides["bias_activation_fusion"] is overrides["moe_grouped_gemm"] is False
    assert overrides["recompute_modules"] == ["mlp", "core_attn"]
    assert ddp_options(args) == {"bucket_size": 77}
    assert optimizer_options(args) == {"host": False, "moment_dtypes": {}, "apply_wd_to_qk_layernorm": True}
    assert given_fields(trainer_args(str(tmp_path)), *("TransformerConfig", "OptimizerConfig")) == {}
    assert "bucket_size" in {flag.dest for flag in MEGATRON_FLAGS}


@pytest.mark.unit
def test_flags_of_megatrons_own_loop_are_for_plug_ins(tmp_path, caplog):
    if package_dir("megatron.training") is None:
        pytest.skip("megatron.training comes with megatron-core 0.19")
    assert problems(tmp_path, CONFIGS["qwen3-4B"], "--train-iters", "7", "--log-interval", "3") == ""
    assert "'--log-interval', '--train-iters'" in caplog.text and "slime does not read them" in caplog.text


@pytest.mark.unit
def test_another_trainer_refuses_them(tmp_path):
    config = CONFIGS["qwen3-4B"]
    text = problems(tmp_path, config, "--train-backend", "fsdp", "--ddp-bucket-size", "5", "--no-batch-p2p-comm")
    assert "--ddp-bucket-size 5: has no effect with --train-backend fsdp" in text
    assert "--batch-p2p-comm: has no effect" in text


@pytest.mark.unit
@pytest.mark.parametrize("offload", [False, True])
def test_user_buffers_do_not_outlive_their_group(offload):
    found = Problems()
    validation._check_user_buffers(Namespace(nccl_ub=True, offload_train=offload), found)
    assert found.concern("--use-nccl-ub") is offload


VARIANTS = {
    "overlapped gradients": ("--overlap-grad-reduce", "--ddp-bucket-size", "3000"),
    "moments on the host": ("--optimizer-cpu-offload",),
    "cpu_adam": ("--optimizer", "cpu_adam"),
    "as launch scripts have it": (
        *("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer"),
    ),
}
NARROW = (
    *("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
    *("--adam-beta2", "0.98"),
)
UNEVEN = ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1")


def runs(rank, world_size, port, path, root):
    def trainer(*flags, **changes):
        common = ("--train-backend", "megatron", "--weight-decay", "0.1", "--num-steps-per-rollout", "2")
        layout = {} if "--pipeline-model-parallel-size" in flags else {"actor_num_gpus_per_node": 2}
        args = trainer_args(path, *common, "--actor-num-gpus-per-node", "2", *flags, **layout)
        args.load, args.no_load_optim, args.no_load_rng, args.finetune = None, False, False, False
        args.start_rollout_id = None
        vars(args).update(changes)
        return start_trainer(args, rank, world_size, port)

    def trained(one):
        for rollout_id in range(2):
            train_rollout(one, rollout_id)
        return parameters_of(one)

    results = {"plain": trained(trainer())}
    stop_trainer()
    for name, flags in {**VARIANTS, "uneven stages": UNEVEN}.items():
        results[name] = trained(trainer(*flags))
        stop_trainer()
    first = trainer("--optimizer-cpu-offload", save=f"{root}/save")
    train_rollout(first, 0)
    first.save_model(0)
    stop_trainer()
    for name, flags in {"host to host": ("--optimizer-cpu-offload",), "host to device": ()}.items():
        second = trainer(*flags, load=f"{root}/save")
        train_rollout(second, 1)
        results[name] = parameters_of(second)
        stop_trainer()
    results["beta2 0.98"] = trained(trainer("--adam-beta2", "0.98"))
    stop_trainer()
    whole = trainer(*NARROW)
    results["narrow"] = trained(whole)
    results["dtypes"] = {x.dtype for x in whole.optimizer.state_tensors() if x.dtype != torch.float32}
    stop_trainer()
    first = trainer(*NARROW, save=f"{root}/narrow")
    train_rollout(first, 0)
    first.save_model(0)
    stop_trainer()
    second = trainer(*NARROW, "--pipeline-model-parallel-size", "2", load=f"{root}/narrow")
    train_rollout(second, 1)
    results["narrow, resumed in stages"] = parameters_of(second)
    stop_trainer()
    second = trainer("--adam-beta1", "0.8", "--adam-beta2", "0.9", "--adam-eps", "1e-3", load=f"{root}/save")
    groups = [group for inner in second.optimizer.torch_optimizers() for group in inner.param_groups]
    results["numbers of AdamW"] = {(group["betas"], group["eps"]) for group in groups}
    stop_trainer()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path, root = str(tmp_path_factory.mktemp("model")), str(tmp_path_factory.mktemp("runs"))
    save_family("qwen3", path)
    return run_world(runs, 2, path, root)


@pytest.mark.integration
@pytest.mark.parametrize("name", [*VARIANTS, "uneven stages", "host to host", "host to device"])
def test_options_change_where_and_when_but_not_what(results, name):
    for rank in results:
        for key, expected in rank["plain"].items():
            assert (rank[name][key] - expected).abs().max() < 2e-6, key
    assert not torch.equal(results[0]["plain"]["model.norm.weight"], torch.ones(32))


@pytest.mark.integration
def test_moments_of_fewer_bits(results):
    for rank in results:
        assert rank["dtypes"] == {torch.bfloat16}
        apart = [(rank["narrow"][key] - value).abs().max() for key, value in rank["beta2 0.98"].items()]
        assert 0 < max(apart) < 2**-7 * 4e-3  # four steps of --lr 1e-3
        for key, value in rank["narrow"].items():
            assert (rank["narrow, resumed in stages"][key] - value).abs().max() < 2e-7, key


@pytest.mark.integration
def test_flags_hold_after_resuming(results):
    assert all(rank["numbers of AdamW"] == {((0.8, 0.9), 1e-3)} for rank in results)
