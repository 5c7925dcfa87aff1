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
        ("os.path.sep", "--x 'os.path.sep' is '/', not a function"),
    ],
)
def test_errors_name_flag_path_and_what_is_missing(path, message):
    with pytest.raises(HookError) as error:
        load_function(path, "--x")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:", r"the import failed: SyntaxError: .*hook_\d+.py, line 1"),
        ("\nraise ValueError('no key')", r"the import failed: ValueError: no key \(.*hook_\d+.py:2\)"),
        ("import no_such_lib", r"there is no module 'no_such_lib' .*\(.*hook_\d+.py:1\)"),
    ],
)
def test_a_module_that_does_not_import_is_shown_with_its_line(tmp_path, monkeypatch, source, message):
    name = f"hook_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HookError, match=f"--x '{name}.f': {message}"):
        load_function(f"{name}.f", "--x")


def test_introspection():
    def old(a, b): ...
    def new(a, b, *, evaluation=False): ...
    def free(a, **kwargs): ...

    assert [accepts(f, "evaluation") for f in (old, new, free)] == [False, True, True]
    assert accepted(new, evaluation=True, rollout_id=1) == {"evaluation": True}


def test_flatten():
    assert list(flatten([1, [2, [3]], (4,)])) == [1, 2, 3, 4]
