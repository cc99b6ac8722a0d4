"""vLLM's requests and steps as orders: what is saved when, from which pages, and whose pages must be let go."""

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prefixcache.identity.keys import KEY_BYTES, block_keys, root_key
from prefixcache_vllm import media
from prefixcache_vllm.options import Options
from prefixcache_vllm.orders import PageRun
from prefixcache_vllm.scheduler import NOTHING, SchedulerSide
from tests.unit.vllm_adapter.fakes import (
    NAMESPACE,
    SIZE,
    FakeAsker,
    FakeRequest,
    blocks_of,
    engine,
    image,
    step,
    until_read,
)


@pytest.fixture
def asker() -> FakeAsker:
    return FakeAsker()


def side_of(asker: FakeAsker, **options: Any) -> SchedulerSide:
    return SchedulerSide(engine(), Options(**options), asker)


def request(name: str = "r", tokens: int = 200) -> FakeRequest:
    return FakeRequest(name, list(range(1, tokens + 1)))


def admit(side: SchedulerSide, asker: FakeAsker, each: FakeRequest, table: list[int], found: int = 0) -> None:
    """From arrival to running, with `found` blocks loaded."""
    assert side.matched(each, 0) == (None, False)
    asker.tell(found)
    external, later = side.matched(each, 0)
    assert (external, later) == (found * SIZE, found > 0)
    side.placed(each, (table,), external or 0)
    if found:
        (order,) = side.step(step({}, {})).loads
        assert (order.from_token, order.to_token) == (0, external)
        side.loaded({each.request_id}, (), ())
        each.num_computed_tokens = external or 0
        side.placed(each, (table,), 0)


def test_a_prompt_is_saved_in_the_step_that_computes_it(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    table = list(range(10, 17))
    admit(side, asker, each, table)
    orders = side.step(step({"r": 200}, {"r": (table,)}))
    (order,) = orders.saves
    assert (order.first_block, order.end_block) == (0, 3)
    assert order.pages == (PageRun(0, tuple(table[:6])),)
    assert order.keys == block_keys(NAMESPACE.epoch.root, each.all_token_ids, SIZE)
    assert orders.namespaces.keys() == {order.fingerprint}


def test_chunks_and_generated_tokens_follow(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    table = list(range(10, 20))
    admit(side, asker, each, table)
    assert side.step(step({"r": 100}, {"r": (table,)})).saves[0].end_block == 1
    each.num_computed_tokens = 100
    (order,) = side.step(step({"r": 100}, {"r": (table,)})).saves
    assert (order.first_block, order.end_block, order.pages[0].first) == (1, 3, 2)
    each.num_computed_tokens = 200
    each.output = list(range(500, 556))
    assert not side.step(step({"r": 1}, {"r": (table,)})).saves
    each.num_computed_tokens = 255
    (order,) = side.step(step({"r": 1}, {"r": (table,)})).saves
    assert (order.first_block, order.end_block, blocks_of(order.keys)) == (3, 4, 4)


def test_a_step_that_completes_no_block_asks_for_no_table(asker: FakeAsker) -> None:
    for options in ({}, {"prompt_only": True}):
        side, each = side_of(asker, **options), request()
        table = list(range(10, 20))
        admit(side, asker, each, table)
        assert side.step(step({"r": 200}, {"r": (table,)})).saves
        each.num_computed_tokens, each.output = 200, [9] * (55 if not options else 500)
        orders = side.step(step({"r": 1 if not options else 300}, {}))  # an empty table would be an error
        assert orders is NOTHING, "made anew in every step it would cost as much as all else there"


def test_drafts_are_not_saved(asker: FakeAsker) -> None:
    side, each = side_of(asker), request(tokens=191)
    admit(side, asker, each, [1] * 10)
    side.step(step({"r": 191}, {"r": ([1] * 10,)}))
    each.num_computed_tokens = 191
    # The step computes three guesses beyond what is known; block 3 would be whole with them.
    assert not side.step(step({"r": 4}, {"r": ([1] * 10,)})).saves


def test_prompt_only(asker: FakeAsker) -> None:
    side, each = side_of(asker, prompt_only=True), request()
    admit(side, asker, each, [1] * 10)
    each.output = list(range(500, 600))
    (order,) = side.step(step({"r": 300}, {"r": ([1] * 10,)})).saves
    assert order.end_block == 3


def test_what_was_loaded_is_not_saved_again(asker: FakeAsker) -> None:
    side, each = side_of(asker), request(tokens=400)
    admit(side, asker, each, [1] * 13, found=4)
    (order,) = side.step(step({"r": 144}, {"r": ([1] * 13,)})).saves
    assert (order.first_block, order.end_block) == (4, 6)


def test_pages_are_kept_until_saves_are_over(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    admit(side, asker, each, [1] * 10)
    side.step(step({"r": 200}, {"r": ([1] * 10,)}))
    each.num_computed_tokens = 200
    each.output = [9]
    assert side.finished(each, ([1] * 10,))
    assert side.step(step({}, {})).closing == {"r"}
    assert not side.step(step({}, {})).closing
    assert len(side.book) == 0


def test_a_block_that_became_whole_with_the_last_results_is_saved_at_the_end(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    table = list(range(10, 20))
    admit(side, asker, each, table)
    side.step(step({"r": 200}, {"r": (table,)}))
    each.num_computed_tokens, each.output = 260, list(range(500, 561))
    assert side.finished(each, (table,))
    (order,) = side.step(step({}, {})).saves
    assert (order.first_block, order.end_block) == (3, 4)


def test_a_request_that_saved_nothing_keeps_nothing(asker: FakeAsker) -> None:
    side, each = side_of(asker), request(tokens=30)
    assert side.matched(each, 0) == (0, False)
    assert not side.finished(each, ([1],))


def test_aborted_while_loading_keeps_its_lease_until_the_copy_is_over(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    side.matched(each, 0)
    asker.tell(2)
    side.placed(each, ([5, 6, 7, 8],), side.matched(each, 0)[0] or 0)
    side.step(step({}, {}))
    assert not side.finished(each, ([5, 6, 7, 8],)), "vLLM itself waits for the load"
    assert asker.open == 1
    side.loaded({"r"}, (), ())
    assert (asker.open, len(side.book)) == (0, 0)


def test_a_failure_told_by_page_is_found(asker: FakeAsker) -> None:
    side = side_of(asker)
    for number, name in enumerate("ab"):
        each = request(name)
        side.matched(each, 0)
        asker.tell(2)
        side.placed(each, ([10 * number + i for i in range(1, 5)],), side.matched(each, 0)[0] or 0)
    side.step(step({}, {}))
    side.loaded({"a", "b"}, (), {12})
    assert side.book.loaded_tokens == 128
    assert sorted(used for _, used in asker.given_back) == [0, 128]


def test_leaving_are_those_that_lost_their_blocks(asker: FakeAsker) -> None:
    side = side_of(asker)
    for name in "abc":
        admit(side, asker, request(name), [1] * 10)
    requests = {name: side._requests[name] for name in "abc"}
    tables: dict[str, tuple[list[int], ...]] = {name: ([1] * 10,) for name in "abc"}
    assert not side.step(step(dict.fromkeys("abc", 10), tables)).leaving
    requests["b"].status = SimpleNamespace(name="PREEMPTED")
    # a is left out of the step by the token budget, b lost its blocks, c goes on but lost and got blocks in between
    assert side.step(step({"c": 10}, tables, preempted_req_ids={"c"})).leaving == {"b", "c"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_token_ids": None}, "prompt_embeds"),
        ({"pooling_params": 1}, "pooling"),
        ({"resumable": True}, "streaming_input"),
    ],
)
def test_requests_that_are_left_alone(asker: FakeAsker, change: dict[str, Any], reason: str) -> None:
    side, each = side_of(asker), request()
    for name, value in change.items():
        setattr(each, name, value)
    assert side.matched(each, 0) == (0, False)
    assert side.skipped == {reason: 1}
    assert not side.finished(each, ([1],))


def test_salt_images_and_epochs_change_the_keys(asker: FakeAsker) -> None:
    side = side_of(asker)
    keys = set()
    plain = request("a")
    salted = request("b")
    salted.cache_salt = "s"
    seeing = request("c")
    seeing.mm_features = [image("cat", 70)]
    until_read(lambda: side._media_of(seeing))
    for each in (plain, salted, seeing):
        side.matched(each, 0)
        keys.add(asker.asked[-1].question.prompt.keys)
    first = asker.asked[0].question.prompt.keys
    assert first == block_keys(NAMESPACE.epoch.root, plain.all_token_ids, SIZE)
    assert asker.asked[1].question.prompt.keys == block_keys(
        root_key(NAMESPACE.epoch.fingerprint, cache_salt=b"s"), plain.all_token_ids, SIZE
    )
    assert asker.asked[2].question.prompt.keys[:32] == first[:32], "the image begins in the second block"
    side.reset()
    again = request("d")
    side.matched(again, 0)
    keys.add(asker.asked[-1].question.prompt.keys)
    assert len(keys) == 4
    assert side.book.get("a") is not None


def test_images_separate_from_where_they_begin(asker: FakeAsker) -> None:
    side = side_of(asker)

    def keys_of(name: str, *images: tuple[str, int]) -> list[bytes]:
        each = request(name, 5 * SIZE)
        each.mm_features = [image(content, offset) for content, offset in images]
        if images:
            assert side.matched(each, 0) == (None, False), "another thread reads them"
            until_read(lambda: side._media_of(each))
        side.matched(each, 0)
        keys = asker.asked[-1].question.prompt.keys
        return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]

    def shared(one: list[bytes], other: list[bytes]) -> int:
        return next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))

    plain = keys_of("plain")
    both = keys_of("both", ("cat", 70), ("dog", 200))
    assert keys_of("again", ("dog", 200), ("cat", 70)) == both, "the same images in the same places"
    assert shared(both, plain) == 1, "no text is an image"
    assert shared(both, keys_of("bird", ("cat", 70), ("bird", 200))) == 3, "the first image is shared, the second not"
    assert shared(both, keys_of("swapped", ("dog", 70), ("cat", 200))) == 1
    assert shared(both, keys_of("moved", ("cat", 71), ("dog", 200))) == 1, "nor is an image in another place"


def test_images_that_cannot_be_told_from_others(asker: FakeAsker) -> None:
    """The text in front of one is shared; from it on nothing is stored, and nobody can find anything."""
    side = side_of(asker)

    def seeing(name: str, data: Any) -> FakeRequest:
        each = request(name, 5 * SIZE)
        each.mm_features = [image("cat", 2 * SIZE + 5, name="number 1")]
        each.mm_features[0].data = data
        until_read(lambda: side._media_of(each))
        return each

    first, second = (seeing(name, None) for name in ("first", "second"))
    for each in (first, second):
        admit(side, asker, each, [1] * 10)
    keys = [ask.question.prompt.keys for ask in asker.asked]
    assert keys[0][: 2 * KEY_BYTES] == keys[1][: 2 * KEY_BYTES]
    assert keys[0][2 * KEY_BYTES :] != keys[1][2 * KEY_BYTES :]
    (order,) = side.step(step({"first": 5 * SIZE}, {"first": ([1] * 10,)})).saves
    assert (order.first_block, order.end_block) == (0, 2)
    first.num_computed_tokens = 5 * SIZE
    assert not side.finished(first, ([1] * 10,)) or not side.step(step({}, {})).saves
    assert side.skipped == {"media_not_here": 2}


def test_nothing_is_stored_of_an_image_whose_name_came_to_mean_another(asker: FakeAsker) -> None:
    """It came first and may be computed last: the model then sees what the encoder keeps under that name."""
    side = side_of(asker)
    first, second = request("first", 3 * SIZE), request("second", 3 * SIZE)
    first.mm_features, second.mm_features = [image("cat", 70, name="x")], [image("dog", 70, name="x")]
    until_read(lambda: side._media_of(first))
    admit(side, asker, first, [1] * 6)
    until_read(lambda: side._media_of(second))
    (order,) = side.step(step({"first": 3 * SIZE}, {"first": ([1] * 6,)})).saves
    assert order.end_block == 1


def test_a_request_that_is_left_alone_is_counted_once(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    each.pooling_params = 1
    side.arrived(each)
    for _ in range(3):
        assert side.matched(each, 0) == (0, False)
    assert side.skipped == {"pooling": 1}
    side.finished(each, ([],))
    side.arrived(each)
    assert side.skipped == {"pooling": 2}, "another one under that id"


def write_adapter(folder: Path, value: float) -> None:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.full((2, 2), value)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def lora(number: int, folder: Path, **more: Any) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_name="a", lora_path=str(folder), **more)


def test_adapters_are_their_bytes_also_when_loaded_in_place(asker: FakeAsker, tmp_path: Path) -> None:
    side = side_of(asker)

    def asked(name: str, **more: Any) -> bytes:
        each = request(name)
        each.lora_request = lora(1, tmp_path, **more)
        side.matched(each, 0)
        return asker.asked[-1].question.prompt.keys

    write_adapter(tmp_path, 1.0)
    before = asked("before")
    assert asked("same") == before
    write_adapter(tmp_path, 2.0)
    after = asked("after", load_inplace=True)
    assert after != before
    assert asked("later") == after, "and so it stays"


def test_nothing_is_stored_of_an_adapter_that_was_replaced_meanwhile(asker: FakeAsker, tmp_path: Path) -> None:
    side, each, other = side_of(asker), request(), request("other")
    write_adapter(tmp_path, 1.0)
    each.lora_request, other.lora_request = lora(1, tmp_path), lora(1, tmp_path, load_inplace=True)
    admit(side, asker, each, [1] * 7)
    write_adapter(tmp_path, 2.0)
    side.matched(other, 0)
    for _ in range(2):
        assert not side.step(step({"r": 200}, {"r": ([1] * 7,)})).saves
    assert side.skipped == {"lora_changed": 1}


def test_a_request_whose_every_token_must_be_computed_is_not_looked_up(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    each.skip_reading_prefix_cache = True
    side.arrived(each)
    assert side.matched(each, 0) == (0, False)
    side.placed(each, ([],), 0)
    assert not asker.asked
    assert [hint.only_keys for hint in asker.hints] == [True], "what it computes is stored under its keys"
    assert side.step(step({"r": 200}, {"r": (list(range(10, 17)),)})).saves, "what it computes is stored"


def test_what_a_drafter_lacks_whose_kv_is_not_kept_is_counted(asker: FakeAsker) -> None:
    side = SchedulerSide(dataclasses.replace(engine(), draft_layers=2, draft_off="eagle"), Options(), asker)
    admit(side, asker, request(), list(range(10, 17)), found=2)
    assert side.numbers()["draft_not_loaded.eagle"] == 1


def test_an_arrival_is_hinted_at_without_a_lease(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    side.arrived(each)
    side.arrived(request("short", 10))
    assert [blocks_of(hint.question.prompt.keys) for hint in asker.hints] == [3]
    assert not asker.asked
    assert side.book.pinned_bytes == 0
    assert asker.hints[0].wanted
    side.matched(each, 0)
    assert asker.asked[0].question.prompt.keys == asker.hints[0].question.prompt.keys
    assert not asker.hints[0].wanted, "asked for itself by now"


def test_a_request_that_goes_is_not_prefetched(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    side.arrived(each)
    side.finished(each, ([],))
    assert not asker.hints[0].wanted


def test_a_step_that_asks_again_looks_at_nothing_else(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    side.matched(each, 0)
    side._catch_up = None  # type: ignore[assignment, method-assign] # may not be called
    assert side.matched(each, 0) == (None, False)


def test_prompts_are_hashed_on_other_threads(asker: FakeAsker, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(parent: bytes, tokens: list[int], size: int, extras: Any) -> bytes:
        hashed.append(len(tokens))
        return block_keys(parent, tokens, size, extras)

    monkeypatch.setattr("prefixcache_vllm.chain.block_keys", counted)
    side, each = side_of(asker), request(tokens=300)
    table = list(range(10, 22))
    side.arrived(each)
    assert side.matched(each, 0) == (None, False)
    assert not hashed
    keys = asker.asked[0].question.prompt.keys  # as an asking thread does
    assert hashed == [256]
    asker.tell(0)
    assert side.matched(each, 0) == (0, False)
    side.placed(each, (table,), 0)
    (order,) = side.step(step({"r": 300}, {"r": (table,)})).saves
    assert order.keys == keys
    each.num_computed_tokens, each.output = 300, [7]
    assert side.finished(each, (table,))
    assert hashed == [256], "nor for tokens that fill no block"


def test_a_root_is_made_once_for_each_salt(asker: FakeAsker, monkeypatch: pytest.MonkeyPatch) -> None:
    side = side_of(asker)
    made: list[bytes] = []

    def counted(fingerprint: bytes, *, tenant_key: bytes | None, cache_salt: bytes) -> bytes:
        made.append(cache_salt)
        return root_key(fingerprint, tenant_key=tenant_key, cache_salt=cache_salt)

    monkeypatch.setattr("prefixcache_vllm.scheduler.root_key", counted)
    for number in range(1100):
        each = request(str(number))
        each.cache_salt = "one" if number % 2 else f"{number} of many"
        side.matched(each, 0)
    assert 1 <= made.count(b"one") <= 2
    assert len(side._roots) <= 1024


def test_loads_inside_the_step(asker: FakeAsker) -> None:
    side, each = side_of(asker, load="sync"), request(tokens=192)
    assert side.matched(each, 0) == (None, False)
    assert asker.asked[0].question.max_tokens == 128, "a token is left to compute"
    asker.tell(2)
    assert side.matched(each, 0) == (128, False)
    side.placed(each, ([1, 2, 3, 4, 5, 6],), 128)
    assert len(side.step(step({"r": 64}, {"r": ([1, 2, 3, 4, 5, 6],)})).loads) == 1
    assert asker.open == 1
    for _ in range(3):
        side.step(step({}, {}))
    assert (asker.open, asker.given_back[-1][1], side.book.loaded_tokens) == (0, 128, 128)


def test_several_groups_never_load_inside_the_step() -> None:
    one = engine()
    two = dataclasses.replace(one, groups=one.groups * 2)
    assert one.loads_in_step(Options(load="sync"))
    assert not two.loads_in_step(Options(load="sync"))


def test_roles(asker: FakeAsker) -> None:
    reader = SchedulerSide(engine(), Options(), asker, saves=False)
    each = request()
    admit(reader, asker, each, [1] * 10)
    assert not reader.step(step({"r": 200}, {"r": ([1] * 10,)})).saves
    writer = SchedulerSide(engine(), Options(), asker, loads=False)
    assert writer.matched(each, 0) == (0, False)
    writer.placed(each, ([1] * 10,), 0)
    writer.arrived(each)
    assert asker.hints[-1].only_keys
    assert writer.step(step({"r": 200}, {"r": ([1] * 10,)})).saves


def test_a_request_preempted_in_the_step_that_loads_comes_back_when_the_load_has_ended(asker: FakeAsker) -> None:
    """Found in it, nothing would be loaded into its new pages: it would run on whatever they hold."""
    side, each = side_of(asker, load="sync"), request(tokens=192)
    tables = {"r": ([1, 2, 3, 4, 5, 6],)}
    side.matched(each, 0)
    asker.tell(2)
    assert side.matched(each, 0) == (128, False)
    side.placed(each, tables["r"], 128)
    side.step(step({"r": 64}, tables))
    each.status = SimpleNamespace(name="PREEMPTED")
    assert side.step(step({}, {})).leaving == {"r"}
    assert side.matched(each, 0) == (None, False)
    side.step(step({}, {}))
    assert side.matched(each, 0) == (None, False)
    assert len(asker.asked) == 2, "it is asked for anew"
    asker.tell(2)
    assert side.matched(each, 0) == (128, False)
    side.placed(each, ([7, 8, 9, 10, 11, 12],), 128)
    (order,) = side.step(step({"r": 64}, {"r": ([7, 8, 9, 10, 11, 12],)})).loads
    assert order.pages == (PageRun(0, (7, 8, 9, 10)),)
    side.finished(each, ([7, 8, 9, 10, 11, 12],))
    for _ in range(3):
        side.step(step({}, {}))
    assert (asker.open, len(side.book)) == (0, 0)


def test_weights_changed_while_a_step_loads_leave_no_lease_behind(asker: FakeAsker) -> None:
    side, each = side_of(asker, load="sync"), request(tokens=192)
    side.matched(each, 0)
    asker.tell(2)
    side.matched(each, 0)
    side.placed(each, ([1, 2, 3, 4, 5, 6],), 128)
    side.step(step({"r": 64}, {"r": ([1, 2, 3, 4, 5, 6],)}))
    each.status = SimpleNamespace(name="PREEMPTED")
    side.reset()
    for _ in range(3):
        assert side.matched(each, 0) == (None, False)
        side.step(step({}, {}))
    old, new = (ask.question.namespace.epoch.fingerprint for ask in asker.asked)
    assert old != new
    assert [ask.question.namespace.epoch.fingerprint for ask, _ in asker.given_back] == [old]


def test_namespaces_of_former_weights_are_forgotten(asker: FakeAsker) -> None:
    side, each = side_of(asker), request()
    admit(side, asker, each, [1] * 10)
    for _ in range(5):
        side.reset()
    assert len(side._identities) == 2, "that of now, and that of a request that runs"
    assert not side.finished(each, ([1] * 10,))


def test_what_a_failed_load_left_out_is_saved_when_it_is_computed(asker: FakeAsker) -> None:
    side, each = side_of(asker, load="sync"), request(tokens=192)
    tables = {"r": ([1, 2, 3, 4, 5, 6],)}
    side.matched(each, 0)
    asker.tell(2)
    side.matched(each, 0)
    side.placed(each, tables["r"], 128)
    each.num_computed_tokens = 128
    assert side.step(step({"r": 64}, tables)).saves[0].first_block == 2
    side.loaded((), (), {1, 2, 3, 4})
    each.num_computed_tokens = 0
    (order,) = side.step(step({"r": 192}, tables)).saves
    assert (order.first_block, order.end_block) == (0, 3)


@pytest.mark.parametrize("queued_s", [0.0, 5.0])
def test_waiting_for_an_image_and_for_the_daemon_have_one_limit(
    asker: FakeAsker, monkeypatch: pytest.MonkeyPatch, queued_s: float
) -> None:
    now, go_on, original = [100.0], threading.Event(), media._content
    monkeypatch.setattr("prefixcache_vllm.scheduler.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(media, "_content", lambda data: (go_on.wait(30.0), original(data))[1])
    side, each = side_of(asker), request()
    each.mm_features = [image("cat", 150)]
    side.arrived(each)
    now[0] += queued_s  # by the engine: it does not wait for us
    assert side.matched(each, 0) == (None, False)
    assert not asker.asked, "it is still being read"
    now[0] += 0.9
    go_on.set()
    until_read(lambda: side._media_of(each))
    assert side.matched(each, 0) == (None, False)
    now[0] += 0.1
    assert side.matched(each, 0) == (0, False)
    assert side.book.reasons == {"deadline": 1}
    side.close()
