"""Groups that are left and joined again between rollouts: nothing of the training changes, nothing of them stays."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime.backends.megatron_utils.groups import ReleasableGroup, ReleasableGroups
from tests.backends.megatron.families import save_family
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import run_world, trainer_args
from tests.tiny_model import save_tiny_model

TP2SP_PP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
PP4_VPP2 = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
EP2_CP2 = {"expert_model_parallel_size": 2, "context_parallel_size": 2}


def two_rollouts(rank, world_size, port, path, layout):
    """[parameters without releasable groups, with them], torch's groups before, while left and after."""
    out, counts = [], []
    for releasable in (False, True):
        args = trainer_args(
            path,
            "--ci-test",
            data_pad_size_multiplier=4,
            make_vocab_size_divisible_by=12,
            offload_train=releasable,
            **layout,
        )
        own = len(c10d._world.pg_names)
        trainer = start_trainer(args, rank, world_size, port, with_ref=True)
        for rollout_id in range(2):
            if releasable:
                trainer.onload()
            train_rollout(trainer, rollout_id)
            if releasable:
                counts.append(len(c10d._world.pg_names) - own)
                trainer.memory._stays = False  # as on a GPU
                trainer.offload(keep_parameters=True)
                assert len(c10d._world.pg_names) - own == counts[-1]  # weights are sent by them
                trainer.offload()
                counts.append(len(c10d._world.pg_names) - own)
        if releasable:
            trainer.onload()
        out.append(parameters_of(trainer))
        stop_trainer()
    dist.destroy_process_group()
    return out, counts


@pytest.mark.parametrize(
    ("layers", "layout", "ranks"),
    [(2, TP2SP_PP2, 4), (8, PP4_VPP2, 4), (None, EP2_CP2, 2)],
    ids=["TP2 PP2", "PP4 VPP2", "EP2 CP2"],
)
def test_training_goes_on_with_groups_that_were_left(tmp_path, layers, layout, ranks):
    if layers:
        save_tiny_model(str(tmp_path), num_hidden_layers=layers)
    else:
        save_family("qwen3_moe", str(tmp_path))
    for (straight, interrupted), counts in run_world(two_rollouts, ranks, str(tmp_path), layout):
        assert all(torch.equal(value, interrupted[name]) for name, value in straight.items())
        assert counts[0] > 10 and counts == [counts[0], 0] * 2


def exchange(rank, world_size, port):
    """What a group of the odd ranks does before and after it was left."""
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    groups = ReleasableGroups()
    with groups.making():
        odd = dist.new_group([3, 1])
    if rank % 2 == 0:
        assert odd is dist.GroupMember.NON_GROUP_MEMBER and groups.groups == []
        dist.destroy_process_group()
        return None
    out = []
    for _ in range(2):
        assert type(odd) is ReleasableGroup and isinstance(odd, dist.ProcessGroup)
        whole = torch.tensor([float(rank)])
        dist.all_reduce(whole, group=odd)
        received = torch.zeros(1)
        peer = 4 - rank
        operations = [
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), peer, odd),
            dist.P2POp(dist.irecv, received, peer, odd),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        names = [None, None]
        dist.all_gather_object(names, f"rank {rank}", group=odd)
        out.append((whole.item(), received.item(), names, dist.get_process_group_ranks(odd), odd.group_name))
        assert dist.get_rank(odd) == rank // 2 and dist.get_world_size(odd) == 2 and dist.get_backend(odd) == "gloo"
        c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))  # as torch.compile does
        groups.release()
        groups.release()
        c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    dist.destroy_process_group()
    return out


def test_a_group_answers_as_torchs_own_would():
    results = run_world(exchange, 4)
    for rank in (1, 3):
        (*first, name), (*second, later) = results[rank]
        assert first == second == [4.0, 4.0 - rank, ["rank 1", "rank 3"], [1, 3]]
        assert name != later
