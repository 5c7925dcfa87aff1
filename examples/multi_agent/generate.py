"""Two agents with one policy: a solver answers, a checker says whether it agrees, the solver may answer again.

Both talk to the OpenAI-compatible endpoint, as any agent framework would. The generate function returns a sample per
conversation: the solver's and the checker's are pieces of one trajectory, which counts once however many it has.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.openai_endpoint import ChatSession, open_session
from slime.rollout.rm_hub import async_rm
from slime.utils.http_utils import HttpError, post
from slime.utils.types import Sample

MAX_ATTEMPTS = 2


async def ask(session: ChatSession, messages: list[dict[str, str]]) -> dict[str, Any]:
    """One chat completion; the assistant's message."""
    reply = await post(f"{session.base_url}/chat/completions", {"messages": messages}, max_retries=0)
    return reply["choices"][0]["message"]


async def solve(session: ChatSession, question: list[dict[str, str]]) -> str:
    """The agents' program; returns the last answer."""
    solver = list(question)
    for attempt in range(MAX_ATTEMPTS):
        answer = await ask(session, solver)
        solver.append(answer)
        checker = [{"role": "user", "content": f"{question[-1]['content']} Is it right?\n{answer['content']}"}]
        verdict = await ask(session, checker)
        if "no" not in verdict["content"].lower() or attempt == MAX_ATTEMPTS - 1:
            break
        solver.append({"role": "user", "content": "Try again."})
    return answer["content"]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """`--custom-generate-function-path`. Prompts are message lists: no --apply-chat-template, the endpoint renders."""
    async with open_session(args, sample, sampling_params) as session:
        try:
            answer = await solve(session, sample.prompt)
        except HttpError as error:
            if not session.interrupted:
                raise
            answer = str(error)
        samples = session.samples()
    pieces = samples if isinstance(samples, list) else [samples]
    if not session.interrupted:
        # What counts is the answer at the end, for everyone who took part.
        last = pieces[0].clone()
        last.response = answer
        reward = await async_rm(args, last)
        for piece in pieces:
            piece.reward = reward
    return samples
