"""The synchronous loop: generate, train, push the weights, again.

Same loop on two CPU cores and on a cluster; colocated (trainers and engines take turns on the same devices) or
disaggregated. `slime train ...` and `python train.py ...` both come here.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from slime.ray.loop import Loop
from slime.ray.session import Session
from slime.utils.arguments import parse_args


def train(args: Namespace, session: Session) -> None:
    """Run the whole training that `args` describe."""
    loop = Loop(args, session)
    with session.metrics.phase("starting engines"):
        loop.start_engines()
        loop.offload_engines()
    with session.metrics.phase("starting trainers"):
        start = loop.start_trainers()
    loop.sync_weights()
    if start == 0 and not args.skip_eval_before_train or loop.num_rollout == 0:
        loop.evaluate(0)

    for rollout_id in range(start, loop.num_rollout):
        data = loop.generate(rollout_id)
        loop.offload_engines()
        loop.train(rollout_id, data)
        if loop.is_time_to_save(rollout_id):
            loop.save(rollout_id)
        loop.offload_trainers()
        loop.sync_weights()
        loop.finish(rollout_id)
        if loop.is_time_to_evaluate(rollout_id):
            loop.evaluate(rollout_id + 1)


def main(argv: list[str] | None = None) -> int:
    """Parse, run, end all processes; returns the exit code (130 after Ctrl-C, 143 after SIGTERM)."""
    args = parse_args(argv)
    with Session(args) as session:
        train(args, session)
    return session.exit_code


if __name__ == "__main__":
    sys.exit(main())
