"""What is assured of tensors of a device is asked for with the next numbers, and is told as if it had been at once."""

from typing import Any

import numpy as np
import pytest

from nlflow._array import numbers
from nlflow._looks import look_now, looking_once
from nlflow.errors import InputError, NumericalError, check_array

torch = pytest.importorskip("torch")

import tests.pretended as pretended  # noqa: E402

pytestmark = pytest.mark.on_cpu("puts tensors on the pretended GPU itself")

GOOD = torch.arange(6.0)
BAD = torch.where(GOOD == 4, torch.nan, GOOD)


def check(name: str, x: Any) -> Any:
    return check_array(name, pretended.put(x))


def test_checks_come_with_the_next_numbers() -> None:
    with pretended.gpu(), pretended.counting() as counts:
        with looking_once():
            there = [check(name, GOOD) for name in ("a", "b", "c")]
            assert counts.synchronizations == 0
            assert numbers(there[0].max(), 2, there[1].min()) == [5.0, 2.0, 0.0]
            assert counts.synchronizations == 1
            assert numbers(there[0].max()) == [5.0]
        assert counts.synchronizations == 2
        with looking_once():
            assert check("a", GOOD) is not None
            look_now()
            assert counts.synchronizations == 3
        check("a", GOOD)
        assert counts.synchronizations == 4


def looked_at(then: str, *given: Any) -> None:
    with looking_once():
        there = [check(name, x) for name, x in zip("abc", given, strict=False)]
        if then == "numbers":
            numbers(there[0].max())
        elif then == "now":
            look_now()
        elif then == "error":
            raise NumericalError("what comes of it")
        elif then == "handled":
            with pytest.raises(InputError, match="b: got"):
                numbers(there[0].max())


@pytest.mark.parametrize("then", ["numbers", "now", "error", "handled", "end"])
def test_the_first_that_is_wrong_is_told(then: str) -> None:
    with pretended.gpu(), pytest.raises(InputError, match=r"^b: got 1 NaN .*index 4\)"):
        looked_at(then, GOOD, BAD, BAD)


def test_an_error_of_its_own_is_told_where_all_is_as_assured() -> None:
    with pretended.gpu(), pytest.raises(NumericalError, match="what comes of it"):
        looked_at("error", GOOD)


def test_who_looks_within_has_looked_when_it_returns() -> None:
    with pretended.gpu(), looking_once():
        with pytest.raises(InputError, match="b: got"), looking_once():
            check("b", BAD)
        check("a", GOOD)


def test_a_sum_that_overflows_is_no_infinity() -> None:
    with pretended.gpu(), looking_once():
        check("a", torch.full((4,), 3e38))


def test_the_cpu_is_asked_at_once() -> None:
    for bad in (BAD, BAD.numpy()):
        with looking_once(), pytest.raises(InputError, match="a: got 1 NaN"):
            check_array("a", bad)
    assert np.isfinite(check_array("a", GOOD.numpy())).all()
