"""The book: one question per request, answers from memory, leases given back once, a bound on what waits."""

import pytest

from prefixcache_vllm.book import LOAD_FAILED, PIN_BUDGET, TOO_LATE, Entry, Limits, Phase, RequestBook
from prefixcache_vllm.chain import RequestChain
from tests.unit.vllm_adapter.fakes import NAMESPACE, SIZE, FakeAsker

BLOCK_BYTES = NAMESPACE.block_bytes


@pytest.fixture
def asker() -> FakeAsker:
    return FakeAsker()


def book_of(asker: FakeAsker, *, keep_last: int = 0, share: float = 0.25) -> RequestBook:
    return RequestBook(Limits(SIZE, BLOCK_BYTES, 1.0, share, keep_last), asker)


def entry_of(book: RequestBook, name: str = "r", tokens: int = 640) -> Entry:
    epoch = NAMESPACE.epoch
    chain = RequestChain(epoch.root, epoch.fingerprint, SIZE, list(range(1, tokens + 1)))
    return book.enter(Entry(name, NAMESPACE, chain))


def test_asked_once_however_often_the_scheduler_asks(asker: FakeAsker) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    assert [book.matched(entry, 640, 0, now) for now in (0.0, 0.1, 0.2)] == [None] * 3
    asker.tell(5)
    assert [book.matched(entry, 640, 0, now) for now in (0.3, 0.4)] == [320, 320]
    assert len(asker.asked) == 1


def test_only_what_lies_beyond_the_engines_own_hit(asker: FakeAsker) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    assert book.matched(entry, 640, 96, 0.0) is None
    assert asker.asked[0].question.from_token == 64
    asker.tell(5)
    assert book.matched(entry, 640, 96, 0.0) == 320 - 96
    assert book.matched(entry, 640, 320, 0.0) == 0


def test_a_shorter_own_hit_than_what_was_leased_asks_anew(asker: FakeAsker) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    book.matched(entry, 640, 128, 0.0)
    asker.tell(5)
    assert book.matched(entry, 640, 128, 0.0) == 192
    assert book.matched(entry, 640, 0, 0.0) is None
    assert (len(asker.asked), asker.open) == (2, 1)


def test_a_lease_about_to_end_is_not_begun_with(asker: FakeAsker) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    book.matched(entry, 640, 0, 0.0)
    asker.tell(5, ends_at=10.0)
    assert book.matched(entry, 640, 0, 1.0) == 320
    assert book.matched(entry, 640, 0, 9.0) is None
    assert asker.open == 1


def test_an_answer_that_does_not_come_is_not_waited_for(asker: FakeAsker) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    assert book.matched(entry, 640, 0, 0.0) is None
    assert book.matched(entry, 640, 0, 1.1) == 0
    assert book.matched(entry, 640, 0, 1.2) == 0
    assert book.reasons == {TOO_LATE: 1}
    assert asker.open == 0


def test_nothing_found_is_said_once(asker: FakeAsker) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    book.matched(entry, 640, 0, 0.0)
    asker.tell(0)
    assert [book.matched(entry, 640, 0, 0.0) for _ in range(3)] == [0, 0, 0]
    assert book.reasons == {"not_stored": 1}
    assert asker.open == 0


def test_the_last_token_is_computed_where_the_engine_must(asker: FakeAsker) -> None:
    book = book_of(asker, keep_last=1)
    entry = entry_of(book)
    book.matched(entry, 640, 0, 0.0)
    assert asker.asked[0].question.max_tokens == 576
    everything = book_of(asker)
    whole = entry_of(everything)
    everything.matched(whole, 640, 0, 0.0)
    asker.tell(10)
    assert everything.matched(whole, 640, 0, 0.0) == 640


def test_waiting_requests_hold_a_quarter_at_most(asker: FakeAsker) -> None:
    asker.pool_bytes = 4 * 8 * BLOCK_BYTES
    book = book_of(asker)
    first, second, third = (entry_of(book, name) for name in "abc")
    book.matched(first, 640, 0, 0.0)
    assert asker.asked[0].question.max_tokens == 8 * SIZE
    asker.tell(5)
    book.matched(first, 640, 0, 0.0)
    book.matched(second, 640, 0, 0.0)
    assert asker.asked[1].question.max_tokens == 3 * SIZE
    asker.tell(3)
    assert book.matched(second, 640, 0, 0.0) == 3 * SIZE
    assert book.matched(third, 640, 0, 0.0) == 0
    assert book.reasons == {PIN_BUDGET: 1}
    assert book.pinned_bytes == 8 * BLOCK_BYTES
    assert book.placed(first, 320) is not None
    assert book.pinned_bytes == 3 * BLOCK_BYTES


def test_what_has_no_room_beside_guesses_waits_for_their_answers(asker: FakeAsker) -> None:
    asker.pool_bytes = 4 * 10 * BLOCK_BYTES
    book = book_of(asker)
    first, second = entry_of(book, "a"), entry_of(book, "b")
    assert book.matched(first, 640, 0, 0.0) is None
    assert book.matched(second, 640, 0, 0.1) is None
    assert len(asker.asked) == 1, "all ten blocks could be the first one's"
    asker.tell(0)
    assert book.matched(first, 640, 0, 0.2) == 0
    assert book.matched(second, 640, 0, 0.2) is None
    assert asker.asked[1].question.max_tokens == 640
    # Both waits together may take as long as one: then it is computed.
    assert book.matched(second, 640, 0, 1.05) is None
    assert book.matched(second, 640, 0, 1.15) == 0
    assert book.reasons == {"not_stored": 1, TOO_LATE: 1}


def test_guesses_that_are_never_answered_do_not_hold_up_others(asker: FakeAsker) -> None:
    asker.pool_bytes = 4 * 10 * BLOCK_BYTES
    book = book_of(asker)
    first, second = entry_of(book, "a"), entry_of(book, "b")
    assert book.matched(first, 640, 0, 0.0) is None
    assert book.matched(second, 640, 0, 0.0) is None
    assert book.matched(second, 640, 0, 1.1) == 0
    assert book.reasons == {PIN_BUDGET: 1}


def test_what_the_engine_has_itself_is_pinned_too(asker: FakeAsker) -> None:
    asker.pool_bytes = 4 * 8 * BLOCK_BYTES
    book = book_of(asker)
    entry = entry_of(book)
    book.matched(entry, 640, 6 * SIZE, 0.0)
    assert (asker.asked[0].question.from_token, asker.asked[0].question.max_tokens) == (6 * SIZE, 8 * SIZE)
    asker.tell(8)
    assert book.matched(entry, 640, 6 * SIZE, 0.0) == 2 * SIZE
    assert book.pinned_bytes == 8 * BLOCK_BYTES


def test_a_load_gives_its_lease_back_when_it_is_over(asker: FakeAsker) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    book.matched(entry, 640, 0, 0.0)
    asker.tell(5)
    book.matched(entry, 640, 0, 0.0)
    assert book.placed(entry, 320) is not None
    assert book.placed(entry, 0) is None  # vLLM calls again while it loads
    assert asker.open == 1
    book.loaded("r", 320)
    assert asker.given_back[-1][1] == 320
    assert (entry.phase, book.loaded_tokens) == (Phase.RUNNING, 320)


def test_a_failed_load_is_not_tried_again(asker: FakeAsker) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    book.matched(entry, 640, 0, 0.0)
    asker.tell(5)
    book.matched(entry, 640, 0, 0.0)
    book.placed(entry, 320)
    book.loaded("r", 0)
    assert [book.matched(entry, 640, 0, 0.0) for _ in range(2)] == [0, 0]
    assert len(asker.asked) == 1
    assert book.reasons[LOAD_FAILED] >= 1
    assert asker.given_back[-1][1] == 0


@pytest.mark.parametrize("moment", ["new", "asked", "found", "placed", "loaded"])
def test_whenever_a_request_goes_nothing_stays(asker: FakeAsker, moment: str) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    moments = ["new", "asked", "found", "placed", "loaded"]
    if moments.index(moment) >= 1:
        book.matched(entry, 640, 0, 0.0)
    if moments.index(moment) >= 2:
        asker.tell(5)
        book.matched(entry, 640, 0, 0.0)
    if moments.index(moment) >= 3:
        book.placed(entry, 320)
    if moments.index(moment) >= 4:
        book.loaded("r", 320)
    book.forget("r")
    if moment == "placed":
        assert (len(book), asker.open) == (1, 1), "it is still being copied from"
        book.loaded("r", 320)
    assert (len(book), asker.open, book.pinned_bytes) == (0, 0, 0)


def test_a_preempted_request_asks_anew_and_saves_again(asker: FakeAsker) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    book.matched(entry, 640, 0, 0.0)
    asker.tell(0)
    book.matched(entry, 640, 0, 0.0)
    book.placed(entry, 0)
    assert book.to_save(entry, 200) == range(3)
    assert book.to_save(entry, 210) == range(0)
    assert book.to_save(entry, 640) == range(3, 10)
    assert book.matched(entry, 640, 0, 0.0) is None
    asker.tell(4)
    assert book.matched(entry, 640, 0, 0.0) == 256
    book.placed(entry, 256)
    book.loaded("r", 256)
    assert book.to_save(entry, 640) == range(4, 10)


def test_a_new_epoch_ends_everything(asker: FakeAsker) -> None:
    book = book_of(asker)
    waiting, running = entry_of(book, "a"), entry_of(book, "b")
    for entry in (waiting, running):
        book.matched(entry, 640, 0, 0.0)
        asker.tell(5)
        book.matched(entry, 640, 0, 0.0)
    book.placed(running, 320)
    book.loaded("b", 320)
    book.new_epoch()
    assert asker.open == 0
    assert book.to_save(running, 640) == range(0)
    assert entry_of(book, "a") is not waiting


def test_a_late_lease_is_given_back_by_whoever_finds_it() -> None:
    asker = FakeAsker()
    book = book_of(asker)
    entry = entry_of(book)
    book.matched(entry, 640, 0, 0.0)
    ask = asker.asked[0]
    book.forget("r")
    assert ask.forget() is None
    lease = object()
    assert ask.came(None, lease) is lease  # type: ignore[arg-type] # what it is does not matter


def test_what_was_found_for_a_request_that_begins_anew_is_given_back(asker: FakeAsker) -> None:
    book = book_of(asker)
    book.matched(entry_of(book), 640, 0, 0.0)
    asker.tell(5)
    again = entry_of(book)
    assert (asker.open, book.pinned_bytes) == (0, 0)
    assert book.get("r") is again


def test_blocks_that_went_before_they_were_loaded_are_saved(asker: FakeAsker) -> None:
    book = book_of(asker)
    entry = entry_of(book)
    book.matched(entry, 640, 0, 0.0)
    asker.tell(5, ends_at=10.0)
    assert book.matched(entry, 640, 0, 9.0) is None
    asker.tell(0)
    assert book.matched(entry, 640, 0, 9.1) == 0
    book.placed(entry, 0)
    assert book.to_save(entry, 640) == range(10)
