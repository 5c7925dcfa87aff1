"""docs/rewards.md names every reward type, and its examples are true."""

import json
import re
from pathlib import Path

import pytest
from aiohttp import web

from slime.arguments.families.reward import BOXED, RM_TYPES
from slime.rollout.rm_hub import REWARD_TYPES, async_rm
from slime.utils.types import Sample
from tests.rollout.support import make_args, served

pytestmark = pytest.mark.integration
DOC = Path(__file__).parents[2] / "docs" / "rewards.md"
ROW = re.compile(r"^\| `(\w+)` \| .*?\| `(.+?)` \|(?: `(.+?)`)? \| (.+) \|$", re.MULTILINE)
EXAMPLES = ROW.findall(DOC.read_text(encoding="utf-8"))


def test_every_type_has_an_example():
    assert {name for name, *_ in EXAMPLES} == {*RM_TYPES, *BOXED}
    assert set(REWARD_TYPES) == set(RM_TYPES)
    assert len(EXAMPLES) == DOC.read_text(encoding="utf-8").count("\n| `") - 1  # the header


@pytest.mark.parametrize("name, response, label, gives", EXAMPLES)
async def test_examples(name, response, label, gives):
    async def judge(request):
        assert (await request.json())["response"] == "Fine."
        return web.json_response(0.5)

    app = web.Application()
    app.router.add_post("/", judge)
    metadata = {"instruction_id_list": ["format:no_whitespace"], "kwargs": [{}]}
    sample = Sample(index=0, response=response, label=label or None, metadata=metadata)
    async with served(app) as url:
        assert await async_rm(make_args(rm_type=name, rm_url=f"{url}/"), sample) == json.loads(gives)
