"""Which pages and requests hold a draft model's KV: found by running an engine's cache of prefixes beside it, with a
plain record of what each page really holds."""

import random
from dataclasses import dataclass, field

import pytest

from prefixcache_vllm.trust import Trust

PAGE = 16


def test_wrong_from_a_token_on() -> None:
    trust = Trust(PAGE)
    trust.begin("a", 0)
    assert trust.right("a")
    trust.spoil("a", 40)
    trust.spoil("a", 60)
    trust.mark("a", [1, 2, 3, 4, 5])
    assert not trust.right("a")
    for local, right in ((32, True), (48, False), (80, False)):
        trust.begin("b", local)
        trust.look("b", local + 10, lambda: [1, 2, 3, 4, 5, 9])
        assert trust.right("b") is right
    assert not trust.right("nobody")
    trust.spoil("a", 10)
    trust.look("a", 80, lambda: [1, 2, 3, 4, 5])
    trust.begin("b", 16)
    trust.look("b", 20, lambda: [1, 9])
    assert not trust.right("b"), "what became wrong later is marked too"
    trust.forget("a")
    trust.forget("b")
    assert len(trust) == 0


def test_what_grows_behind_wrong_pages_is_wrong() -> None:
    trust = Trust(PAGE)
    trust.begin("a", 0)
    trust.spoil("a", 0)
    trust.look("a", 20, lambda: [1, 2])
    trust.look("a", 50, lambda: [1, 2, 3, 4])
    # Another request computed the same prefix right, in pages 7 and 8, and vLLM's cache joins them with page 3.
    trust.begin("b", 48)
    trust.look("b", 60, lambda: [7, 8, 3, 9])
    assert not trust.right("b")


def test_a_table_is_asked_for_only_where_something_may_be_wrong() -> None:
    trust = Trust(PAGE)

    def table() -> list[int]:
        raise AssertionError("not needed")

    trust.begin("a", 64)
    trust.look("a", 70, table)
    trust.suspect({1})
    trust.look("a", 700, table)  # was looked at already
    trust.begin("b", 0)
    trust.look("b", 70, table)


def test_pages_of_a_load_are_wrong_until_it_has_ended_well() -> None:
    trust = Trust(PAGE)
    trust.suspect({4, 5})
    trust.begin("b", 32)
    trust.look("b", 40, lambda: [4, 5, 6])
    assert not trust.right("b")
    trust.clear({4, 5})
    trust.begin("c", 32)
    trust.look("c", 40, lambda: [4, 5, 7])
    assert trust.right("c")


def test_own_pages_are_those_behind_vllms_own_hit() -> None:
    trust = Trust(PAGE)
    trust.begin("a", 32)
    assert trust.own_pages("a", [1, 2, 3, 4, 5], 70) == [3, 4]


@dataclass
class Run:
    """A request of the engine beside it. `right`: for each token, whether its KV is the draft model's."""

    tokens: tuple[int, ...]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    right: bool = True


class Engine:
    """An engine with a cache of prefixes: each page's content is the prefix it ends and whether it is right."""

    def __init__(self, seed: int, trust: Trust) -> None:
        self.random = random.Random(seed)
        self.trust = trust
        self.pages: dict[int, tuple[tuple[int, ...], bool]] = {}
        self.free = list(range(1, 25))
        self.running: dict[str, Run] = {}
        self.stored = 0

    def admit(self, name: str) -> None:
        kinds = [self.random.choice((0, 1)) for _ in range(self.random.randint(2, 4))]
        run = Run(tuple(kind for kind in kinds for _ in range(PAGE)))
        held = {page for each in self.running.values() for page in each.pages}
        for end in range(PAGE, len(run.tokens), PAGE):
            cached = [page for page, (prefix, _) in self.pages.items() if prefix == run.tokens[:end]]
            if not cached:
                break
            run.pages.append(self.random.choice(cached))
        run.computed = len(run.pages) * PAGE
        run.right = all(self.pages[page][1] for page in run.pages)
        if not self.grow(run, len(run.tokens), held | set(run.pages)):
            return
        self.trust.begin(name, run.computed)
        self.running[name] = run
        if self.random.random() < 0.4:
            self.load(name, run)

    def load(self, name: str, run: Run) -> None:
        """All but the last page's tokens are loaded for the model; perhaps for its draft model too."""
        ends = len(run.tokens) - PAGE
        if ends <= run.computed:
            return
        pages = run.pages[run.computed // PAGE : ends // PAGE]
        outcome = self.random.choice(("ok", "absent", "failed"))
        if outcome == "absent":
            self.trust.spoil(name, run.computed)
            self.trust.mark(name, run.pages)
        else:
            self.trust.suspect(pages)
            if outcome == "ok":
                self.trust.clear(pages)
            else:
                self.trust.spoil(name, run.computed)
        run.right &= outcome == "ok"
        for place, page in enumerate(pages, run.computed // PAGE):
            self.pages[page] = (run.tokens[: (place + 1) * PAGE], run.right)
        run.computed = ends

    def step(self) -> None:
        """Every running request computes a page; the draft model may sit the step out."""
        sits_out = self.random.random() < 0.1
        for name, run in self.running.items():
            end = min(run.computed + PAGE, len(run.tokens))
            if sits_out and end > run.computed:
                self.trust.spoil(name, run.computed)
                run.right = False
            self.trust.look(name, end, lambda table=run.pages: table)  # type: ignore[misc] # bound now
            page = run.pages[run.computed // PAGE] if end > run.computed else None
            run.computed = end
            if page is not None:
                self.pages[page] = (run.tokens[:end], run.right)
            if self.trust.right(name):
                assert run.right, "this would be stored"
                self.stored += 1
                self.trust.clear(self.trust.own_pages(name, run.pages, end))

    def grow(self, run: Run, tokens: int, held: set[int]) -> bool:
        """Pages that nobody runs on; what they held is forgotten."""
        while len(run.pages) * PAGE < tokens:
            left = [page for page in self.free if page not in held]
            if not left:
                return False
            page = self.random.choice(left)
            self.pages.pop(page, None)
            run.pages.append(page)
            held.add(page)
        return True

    def finish(self, name: str) -> None:
        del self.running[name]
        self.trust.forget(name)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_wrong_is_ever_held_to_be_right(seed: int) -> None:
    engine = Engine(seed, Trust(PAGE))
    for number in range(150):
        engine.admit(f"r{number}")
        engine.step()
        for name in list(engine.running):
            if engine.random.random() < 0.4:
                engine.finish(name)
    assert engine.stored > 5, "some is right, and found to be"
