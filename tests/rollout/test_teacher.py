"""What a teacher may answer, from a server that names token ids as SGLang does."""

from argparse import Namespace

import pytest
from aiohttp import web

from slime.rollout.teacher import teacher_log_probs
from slime.utils.types import Sample
from tests.rollout.support import served

pytestmark = pytest.mark.unit
PROMPT = [5, 6, 7]
LAST_ID = 127


def logprob(position: int) -> float:
    return -0.25 * position


class Teacher:
    """`/generate` for requests that only score: SGLang has no log-prob for the first token that it lists, and calls
    the last id of the vocabulary 0. `edit` changes what it lists."""

    def __init__(self, edit=lambda scored: scored) -> None:
        self.edit = edit

    async def generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        assert payload["sampling_params"]["max_new_tokens"] == 0 and payload["return_logprob"]
        ids, start = payload["input_ids"], payload["logprob_start_len"]
        scored = [[logprob(i), ids[i] if ids[i] < LAST_ID else 0, None] for i in range(start, len(ids))]
        scored[0][0] = None
        return web.json_response({"text": "", "meta_info": {"input_token_logprobs": self.edit(scored)}})

    async def score(self, prompt: list[int], response: list[int]) -> list[float]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        sample = Sample(tokens=prompt + response, response_length=len(response))
        async with served(app) as url:
            await teacher_log_probs(Namespace(opd_teacher_url=url), sample)
        return sample.teacher_log_probs


@pytest.mark.parametrize("response", [[8, LAST_ID, 9], [LAST_ID], [0, LAST_ID]])
async def test_the_last_id_of_the_vocabulary_may_be_called_0(response):
    for prompt in (PROMPT, [LAST_ID]):
        expected = [logprob(len(prompt) + i) for i in range(len(response))]
        assert await Teacher().score(prompt, response) == expected


@pytest.mark.parametrize(
    "edit",
    [lambda scored: scored[1:2], lambda scored: [*scored[:-1], [-1.0, 10, None]], lambda scored: scored[::-1]],
    ids=["too few", "another token", "another order"],
)
async def test_scores_of_other_tokens_are_refused(edit):
    with pytest.raises(ValueError, match=r"--opd-teacher-url http.* of other tokens than the 2 of sample"):
        await Teacher(edit).score(PROMPT, [8, 9])
