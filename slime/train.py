"""The synchronous loop: generate, train, push the weights, again.

The same on two CPU cores and on a cluster; colocated (trainers and engines take turns on the same devices) or
disaggregated. `slime train ...` and `python train.py ...` both come here.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from slime.utils.arguments import parse_args

if TYPE_CHECKING:
    from slime.ray.session import Session


def train(args: Namespace, session: Session) -> None:
    """Run the whole training that `args` describe."""
    from slime.ray.placement_group import create_placement_groups, create_training_models
    from slime.ray.rollout import create_rollout_manager

    wait, phase = session.wait, session.metrics.phase
    slices = create_placement_groups(args)
    manager = create_rollout_manager(args, slices["rollout"], session)
    with phase("starting engines and trainers"):
        actor, _ = create_training_models(args, slices, session)
        wait(manager.start.remote())
        session.guard(manager.wait_for_death.remote())
        per_epoch = wait(manager.get_num_rollout_per_epoch.remote())
        args = with_num_rollout(args, per_epoch)
        if args.offload_rollout:
            wait(manager.offload.remote())
        start = args.start_rollout_id or 0
        if actor is not None:
            start = wait(actor.async_init(args, with_ref=args.use_kl_loss or args.kl_coef != 0))[0]
            actor.connect(manager)
            session.track_memory(actor.pids())
        session.track_memory(wait(manager.pids.remote()))
        wait(manager.load.remote(start - 1))

    def sync_weights() -> dict[str, float]:
        """The trainers' weights to the engines, which serve them as the next version."""
        if args.debug_train_only or args.debug_rollout_only:
            return {}
        with phase("updating weights"):
            metrics = wait(actor.call("offload"))[0] if args.offload_train else {}
            if args.offload_rollout:
                wait(manager.onload.remote(["weights"]))
            metrics |= wait(actor.call("update_weights"))[0]
            if args.offload_rollout:
                wait(manager.onload.remote(["cuda_graph", "kv_cache"]))
        return metrics

    def evaluate(rollouts_done: int) -> None:
        with phase("evaluating"):
            metrics = wait(manager.eval.remote(rollouts_done))
        session.metrics.log_eval(rollouts_done, metrics)

    def save(rollout_id: int) -> dict[str, float]:
        """The data position first: the model's tracker file, written last, is what makes the checkpoint count."""
        with phase("saving"):
            wait(manager.save.remote(rollout_id))
            return wait(actor.call("save_model", rollout_id))[0]

    sync_weights()
    if args.check_weight_update_equal:
        wait(actor.call("check_weights"))
    evaluates = args.eval_interval is not None and not args.debug_train_only
    if evaluates and (args.num_rollout == 0 or (start == 0 and not args.skip_eval_before_train)):
        evaluate(start)

    for rollout_id in range(start, args.num_rollout):
        progress = f"rollout {rollout_id + 1}/{args.num_rollout}"
        with phase(f"{progress}: generating"):
            rollout = wait(manager.generate.remote(rollout_id), progress=manager.progress.remote)
        metrics = rollout.metrics
        if args.offload_rollout:
            wait(manager.offload.remote())
        if actor is not None:
            with phase(f"{progress}: training"):
                metrics |= wait(actor.call("onload"))[0] if args.offload_train else {}
                metrics |= wait(actor.async_train(rollout_id, rollout.refs))[0]
            session.run_dir.record_trained(rollout_id, rollout.sample_indices)
            if args.save is not None and is_time_to_save(args, rollout_id, per_epoch):
                metrics |= save(rollout_id)
        metrics |= sync_weights() | session.memory_metrics()
        session.metrics.log_rollout(rollout_id, args.num_rollout, metrics)
        if evaluates and (rollout_id + 1) % args.eval_interval == 0:
            evaluate(rollout_id + 1)


def with_num_rollout(args: Namespace, per_epoch: int | None) -> Namespace:
    """`--num-epoch` as a number of rollouts, known once the data is open; before trainers read it."""
    if args.num_rollout is not None:
        return args
    return Namespace(**{**vars(args), "num_rollout": args.num_epoch * per_epoch})


def is_time_to_save(args: Namespace, rollout_id: int, per_epoch: int | None) -> bool:
    """Every `--save-interval` rollouts, at the end of each epoch, and after the last rollout."""
    done = rollout_id + 1
    intervals = [n for n in (args.save_interval, per_epoch) if n]
    return done == args.num_rollout or any(done % n == 0 for n in intervals)


def main(argv: list[str] | None = None) -> int:
    """Parse, run, end all processes; returns the exit code (130 after Ctrl-C, 143 after SIGTERM)."""
    args = parse_args(argv)
    from slime.ray.session import Session  # only now: a wrong configuration is reported without importing ray

    with Session(args) as session:
        train(args, session)
    return session.exit_code


if __name__ == "__main__":
    sys.exit(main())
