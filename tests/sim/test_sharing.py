"""Seeds that are about shared reservations find nothing; with a bug planted there, some of them do."""

from __future__ import annotations

from typing import Any

import pytest

from prefixcache.core.reservations import Reservation
from prefixcache.core.sessions import Sessions
from prefixcache.core.sharing import Sharing
from tests.sim.planting import Patch, Plant, assert_found
from tests.sim.simulator import Simulator

SEEDS = 400
PLANTED_SEEDS = 1_500


def test_seeds() -> None:
    for seed in range(SEEDS):
        try:
            Simulator(seed, ("shared",)).run()
        except Exception as error:
            raise AssertionError(f"seed {seed} of flavour shared: {error!r}") from error


def slots_back_with_the_first_last_word(patch: Patch) -> None:
    right = Sharing.last_word

    def wrong(self: Sharing, reservation: Reservation, session_id: bytes, outcome: Any) -> None:
        right(self, reservation, session_id, outcome)
        if reservation.expired:
            for other in sorted(reservation.writers):
                right(self, reservation, other, outcome)

    patch.setattr(Sharing, "last_word", wrong)


def further_writers_not_noted(patch: Patch) -> None:
    right = Sharing.known

    def wrong(self: Sharing, event: Any, session: Any, space: Any, out: list[Any]) -> bool:
        known = self.state.reservations.get(event.reservation)
        before = set(known.writers) if known is not None else set()
        answer = right(self, event, session, space, out)
        if known is not None and session.session in known.writers - before:
            known.writers.discard(session.session)
            del session.reservations[event.reservation]
        return answer

    patch.setattr(Sharing, "known", wrong)


def seen_when_one_writer_is_done(patch: Patch) -> None:
    right = Reservation.whole

    def wrong(self: Reservation, *, all_covered: bool) -> Any:
        if self.shared is not None:
            for heads in (self.covered or {}).values():
                heads |= heads.any(axis=1, keepdims=True)
        return right(self, all_covered=all_covered)

    patch.setattr(Reservation, "whole", wrong)


def one_layer_taken_for_all(patch: Patch) -> None:
    right = Reservation.whole

    def wrong(self: Reservation, *, all_covered: bool) -> Any:
        for layers in (self.covered or {}).values():
            layers |= layers.any(axis=2, keepdims=True)
        return right(self, all_covered=all_covered)

    patch.setattr(Reservation, "whole", wrong)


def any_prompt_under_one_id(patch: Patch) -> None:
    patch.setattr(Sharing, "_may_join", lambda self, event, reservation: reservation.shared is not None)


def over_before_everybody_came(patch: Patch) -> None:
    patch.setattr(Reservation, "ends_with", lambda self, session: self.writers <= {session})


def a_lost_session_is_not_missed(patch: Patch) -> None:
    right = Sessions._end

    def wrong(self: Sessions, session: Any, out: list[Any]) -> None:
        mine = {key: each for key, each in session.reservations.items() if each.shared is not None}
        session.reservations = {key: each for key, each in session.reservations.items() if key not in mine}
        for each in mine.values():
            each.writers.discard(session.session)
        right(self, session, out)

    patch.setattr(Sessions, "_end", wrong)


PLANTED: tuple[Plant, ...] = (
    slots_back_with_the_first_last_word,
    further_writers_not_noted,
    seen_when_one_writer_is_done,
    one_layer_taken_for_all,
    any_prompt_under_one_id,
    over_before_everybody_came,
    a_lost_session_is_not_missed,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_finds_the_planted_bug(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(plant, monkeypatch, lambda seed: Simulator(seed, ("shared",)).run(), PLANTED_SEEDS)
