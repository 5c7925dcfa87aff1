"""An OpenAI-compatible chat endpoint whose conversations become samples.

Any agent that takes a base URL can be trained, as a black box: it talks to `session.base_url`, and every token that it
was given is in `session.samples()` with its log-prob and loss mask, exactly as the engine generated it.

    async def generate(args, sample, sampling_params):
        async with open_session(args, sample, sampling_params) as session:
            await my_agent(session.base_url, task=sample.prompt)
        return session.samples()
"""

from slime.rollout.openai_endpoint.server import open_session
from slime.rollout.openai_endpoint.session import ChatSession

__all__ = ["ChatSession", "open_session"]
