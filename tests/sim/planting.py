"""Plants bugs, and asks seeds whether they see them.

A bug that no longer fits what it replaces (a parameter came or went) would be "found" by whatever it raises, so it is
refused when it is planted. It must not know which bugs there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from prefixcache.core.invariants import InvariantError
from tests.sim.fakes import SimError

# What a simulator raises that found something, and what code raises that was led astray.
FINDS = (SimError, InvariantError, AssertionError, LookupError, ValueError)


class Patch:
    """A `pytest.MonkeyPatch` that takes only what can be called as what it replaces."""

    def __init__(self, inner: pytest.MonkeyPatch) -> None:
        self.inner = inner

    def setattr(self, owner: Any, name: str, wrong: Any) -> None:
        """Raises TypeError if `wrong` would refuse a call that `owner.name` takes."""
        right = getattr(owner, name)
        if inspect.isfunction(right):
            theirs = inspect.signature(right).parameters.values()
            needed = [one for one in theirs if one.default is one.empty]
            for call in (list(theirs), needed):
                by_place = [one for one in call if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
                by_name = {one.name: None for one in call if one.kind is one.KEYWORD_ONLY}
                inspect.signature(wrong).bind(*by_place, **by_name)
        self.inner.setattr(owner, name, wrong)


Plant = Callable[[Patch], None]


def assert_found(plant: Plant, monkeypatch: pytest.MonkeyPatch, run: Callable[[int], None], seeds: int) -> None:
    """Plants a bug and runs seeds until one finds it; AssertionError if none does."""
    plant(Patch(monkeypatch))
    for seed in range(seeds):
        try:
            run(seed)
        except FINDS:
            return
    raise AssertionError(f"{seeds} seeds did not find {plant.__name__}")
