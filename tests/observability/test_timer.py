import pytest

from slime.observability.timer import Timer

pytestmark = pytest.mark.unit


def test_names_add_up_and_nest():
    timer = Timer()
    with timer("outer"):
        with timer("inner"):
            pass
        with timer("inner"):
            pass
    timer.add("inner", 5.0)
    times = timer.pop()
    assert set(times) == {"perf/outer_time", "perf/inner_time"}
    assert times["perf/inner_time"] > 5.0 > times["perf/outer_time"] > 0.0


def test_pop_starts_anew_and_errors_still_count():
    timer = Timer()
    with pytest.raises(RuntimeError), timer("broken"):
        raise RuntimeError
    assert "perf/broken_time" in timer.pop()
    assert timer.pop() == {}
