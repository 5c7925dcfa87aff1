"""The reward of verifiable instructions (`--rm-type ifbench`)."""

from __future__ import annotations

from slime.rollout.errors import RewardError
from slime.rollout.rm_hub.guard import in_daemon_thread
from slime.rollout.rm_hub.ifbench import InstructionError, answer_of, grade
from slime.utils.types import Sample

_NEEDS = "needs metadata.instruction_id_list and metadata.kwargs, two lists of one length"


async def instruction_reward(sample: Sample, response: str) -> float:
    """1.0 when the response follows all instructions in the sample's metadata, else 0.0.

    `metadata.ifbench` then says which ones it follows. `metadata.loose` (true) asks for the lenient grade.
    """
    ids, kwargs = sample.metadata.get("instruction_id_list"), sample.metadata.get("kwargs")
    if not isinstance(ids, list) or not isinstance(kwargs, list) or not ids:
        raise RewardError.about(sample, "--rm-type ifbench", _NEEDS)
    loose = bool(sample.metadata.get("loose"))
    try:
        verdicts = await in_daemon_thread(lambda: grade(answer_of(response), ids, kwargs, loose))
    except InstructionError as error:
        raise RewardError.about(sample, "--rm-type ifbench", f"cannot grade: {error}") from error
    sample.metadata["ifbench"] = dict(zip(ids, verdicts, strict=True))
    return float(all(verdicts))
