"""Import paths, introspection, nested lists."""

import pytest

from slime.utils.misc import HookError, accepted, accepts, flatten, load_function

pytestmark = pytest.mark.unit


def test_both_spellings_and_nested_names():
    assert load_function("os.path.join") is load_function("os.path:join")
    assert load_function("collections:OrderedDict.fromkeys")("a") == {"a": None}
    assert load_function(len) is len


@pytest.mark.parametrize(
    "path, message",
    [
        ("no_such_pkg.fn", "--x 'no_such_pkg.fn': there is no module 'no_such_pkg'"),
        ("os.path.nothing", "--x 'os.path.nothing': module 'posixpath' has no attribute 'nothing'"),
        ("plain", "--x 'plain' is not an import path; write pkg.module.name"),
        ("", "--x '' is not an import path"),
    ],
)
def test_errors_name_flag_path_and_what_is_missing(path, message):
    with pytest.raises(HookError) as error:
        load_function(path, "--x")
    assert message in str(error.value)


def test_introspection():
    def old(a, b): ...
    def new(a, b, *, evaluation=False): ...
    def free(a, **kwargs): ...

    assert [accepts(f, "evaluation") for f in (old, new, free)] == [False, True, True]
    assert accepted(new, evaluation=True, rollout_id=1) == {"evaluation": True}


def test_flatten():
    assert list(flatten([1, [2, [3]], (4,)])) == [1, 2, 3, 4]
