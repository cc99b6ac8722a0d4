"""A planted bug that fits no more what it replaces is refused, not found."""

from __future__ import annotations

import pytest

from tests.sim.planting import Patch


class Owner:
    def act(self, what: str, count: int = 1, *, loud: bool) -> None: ...


def test_a_bug_that_fits_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    Patch(monkeypatch).setattr(Owner, "act", lambda self, thing, count=2, *, loud: thing)
    assert Owner().act("here", loud=True) == "here"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda self, what, count, more, *, loud: None,
        lambda self, what, *, loud: None,
        lambda self, what, count, *, loud: None,
        lambda self, what, count=1: None,
        lambda self, what, count=1, *, quiet: None,
    ],
)
def test_a_bug_that_does_not_fit_is_refused(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError):
        Patch(monkeypatch).setattr(Owner, "act", wrong)
