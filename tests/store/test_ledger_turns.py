"""Whose turn it is: jobs of one adapter in their order, and others beside them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from test_ledger import submit, take

from groupwise.store import ledger_turns
from groupwise.store.ledger import JobState, Ledger
from groupwise.store.ledger_schema import JobRecord, Lease
from groupwise.store.ledger_turns import CREDIT, LEAD, QUANTUM, Standing, makes_way


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Ledger]:
    book = Ledger(tmp_path / "ledger.db")
    yield book
    book.close()


def post(book: Ledger, adapter: str, base: str | None = None) -> str:
    return submit(book, adapter=adapter, config={"base_adapter": base}).id


# --- what a job waits for ---


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (("math", None), ("math", None), True),
        (("math", None), ("math", "base"), True),
        (("math", None), ("sql", None), False),
        (("math", None), ("sql", "math"), True),  # it continues what the first one makes
        (("math", None), ("sql", "math@3"), True),
        (("math", None), ("sql", "math2"), False),
        (("math", "sql"), ("sql", None), True),  # the first one continues what is there before it
        (("math", "sql@1"), ("sql", None), True),
        (("math", "base"), ("sql", "base"), False),
        (("math", "sql"), ("code", "sql"), False),
    ],
)
def test_a_job_waits_for_those_before_it_that_have_to_do_with_it(book, first, second, waits):
    one, two = post(book, *first), post(book, *second)
    lease = take(book)
    assert lease.job.id == one
    beside = book.lease("w")
    assert (beside is None) is waits
    if beside is None:
        book.published(lease, f"{lease.job.adapter}@1")  # its swap need not be over
        beside = take(book)
    assert beside.job.id == two


def test_a_job_that_waits_again_is_still_before_the_next_of_its_adapter(book):
    one, two, other = post(book, "math"), post(book, "math"), post(book, "sql")
    book.release(take(book))
    assert {take(book).job.id, take(book).job.id} == {one, other}
    assert book.lease("w") is None and book.job(two).position == 1


def test_another_tenants_adapter_of_the_same_name_is_another_one(book):
    submit(book.of("acme"), adapter="math")
    submit(book.of("bell"), adapter="math")
    assert {take(book).job.tenant, take(book).job.tenant} == {"acme", "bell"}


# --- what may begin ---


def test_a_worker_may_not_admit_the_job_whose_turn_it_is(book):
    one, two = post(book, "math"), post(book, "sql")
    seen = []

    def admits(job, running) -> bool:
        seen.append((job.id, [each.id for each in running]))
        return not running

    assert take(book, admits=admits).job.id == one
    assert book.lease("w", admits=admits) is None and book.job(two).state is JobState.QUEUED
    assert seen == [(one, []), (two, [one])]


def furthest_behind(book: Ledger) -> str | None:
    """The job whose turn it is, by the rule as it is written, whatever that takes."""
    jobs = book.jobs()[::-1]

    def is_free(job: JobRecord, place: int) -> bool:
        mine, base = job.adapter, (job.config["base_adapter"] or "").partition("@")[0]
        ahead = [each for each in jobs[:place] if each.tenant == job.tenant and not each.version]
        ahead = [each for each in ahead if not each.state.is_final]
        bases = [(each.config["base_adapter"] or "").partition("@")[0] for each in ahead]
        return job.state is JobState.QUEUED and not (mine in bases or {mine, base} & {each.adapter for each in ahead})

    def clock(job: JobRecord) -> tuple[float, float]:
        own = max(each.own for each in jobs if (each.tenant, each.adapter) == (job.tenant, job.adapter))
        return max(each.turn for each in jobs if each.tenant == job.tenant), own

    return min(((clock(job), place, job.id) for place, job in enumerate(jobs) if is_free(job, place)), default=[None])[
        -1
    ]


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_turn_of_the_adapter_that_is_furthest_behind(book, seed):
    """Whatever order jobs were posted, trained, given back and ended in."""
    random, held = Random(seed), list[Lease]()
    book.database._connection.execute("PRAGMA synchronous=OFF")
    for _ in range(120):
        act = random.choice(("post", "post", "take", "take", "train", "release", "end"))
        if act == "post":
            view = book.of(random.choice(("acme", "bell"))) if random.random() < 0.3 else book
            base = random.choice((None, None, "base", "a", "c@1"))
            submit(view, adapter=random.choice("abcdef"), config={"base_adapter": base}, max_queued=1000)
        elif act == "take":
            expected = furthest_behind(book)
            lease = book.lease("w")
            assert (lease and lease.job.id) == expected
            held += [lease] if lease else []
        elif held:
            lease = held[random.randrange(len(held))]
            if act == "train":
                book.progress(lease, phase="training", tokens=random.randrange(1, 3 * QUANTUM))
            else:
                held.remove(lease)
                book.release(lease) if act == "release" else book.published(lease, f"{lease.job.adapter}@1")


def work(book: Ledger, act: Callable[[], object]) -> int:
    """Return how many of SQLite's instructions an act takes, in tens."""
    counted = []
    book.database._connection.set_progress_handler(lambda: counted.append(1), 10)
    act()
    book.database._connection.set_progress_handler(None, 0)
    return len(counted)


@pytest.mark.parametrize(("one_adapter", "most"), [(False, 1.5), (True, 10)])
def test_a_look_at_the_queue_takes_no_longer_than_its_length_says(book, one_adapter, most):
    def look() -> None:
        book.lease("w", admits=lambda job, running: False)
        book.standings()

    book.database._connection.execute("PRAGMA synchronous=OFF")
    looks, lists = [], []
    for length in (6, 60):
        while (count := len(book.jobs())) < length:
            submit(book, adapter="math" if one_adapter else f"a{count}", max_queued=length)
        if not looks:
            take(book)
        looks.append(work(book, look))
        lists.append(work(book, book.jobs))
    assert looks[1] <= most * looks[0] and lists[1] <= 12 * lists[0]


# --- shares ---


class Simulation:
    """Jobs without end over a real ledger, of which as many as there are `places` have one: whose turn it is makes a
    step, and who is too far ahead makes way. Counts the tokens of each adapter."""

    def __init__(self, book: Ledger, *, places: int, step: Mapping[str, int]):
        self.book, self.places, self.step = book, places, step
        self.running: dict[str, Lease] = {}
        self.tokens: Counter[str] = Counter()
        self.swaps = 0
        book.database._connection.execute("PRAGMA synchronous=OFF")

    def post(self, adapter: str, *, tenant: str = "", weight: int = 1, deadline: float | None = None) -> None:
        view = self.book.of(tenant) if tenant else self.book
        config = {"weight": weight}
        submit(view, adapter=adapter, config=config, steps=10**9, max_queued=1000, deadline=deadline)

    def run(self, tokens: int) -> None:
        until = sum(self.tokens.values()) + tokens
        while sum(self.tokens.values()) < until:
            while len(self.running) < self.places and (lease := self.book.lease("w")) is not None:
                self.running[lease.job.id] = lease
            waiting, standings = self.book.standings()
            if waiting is not None and (first := makes_way(waiting, standings)) is not None:
                self.book.release(self.running.pop(first.job), made_way=True)
                self.swaps += 1
                continue
            behind = min(standings, key=lambda each: (each.clock, each.own - each.lead))
            lease = self.running[behind.job]
            count = self.step[lease.job.adapter[0]]
            self.book.progress(lease, phase="training", tokens=count)
            self.tokens[f"{lease.job.tenant}/{lease.job.adapter}"] += count


@pytest.fixture
def small_quanta(monkeypatch) -> None:
    for name, tokens in (("QUANTUM", 512), ("LEAD", 1024), ("CREDIT", 2048)):
        monkeypatch.setattr(ledger_turns, name, tokens)


def test_an_adapter_of_weight_1_beside_100_heavy_ones_has_its_share(book, monkeypatch):
    """100 adapters of weight 10 with steps of 2,560 tokens, one of weight 1 with steps of 32; 8 places."""
    monkeypatch.setattr(ledger_turns, "QUANTUM", 128)
    monkeypatch.setattr(ledger_turns, "CREDIT", 512)
    world = Simulation(book, places=8, step={"h": 2560, "l": 32})
    for number in range(100):
        world.post(f"heavy-{number}", weight=10)
    world.post("light")
    world.run(1001 * 512)
    heavy = [world.tokens[f"/heavy-{number}"] for number in range(100)]
    assert abs(world.tokens["/light"] - 512) <= 128 + 32  # one part of 1,001, but for a quantum and a step
    assert 5120 - 2560 <= min(heavy) <= max(heavy) <= 5120 + 2560
    assert world.swaps < 400


def test_an_adapter_of_weight_1_has_its_share_while_100_heavy_ones_claim_deadlines(book, monkeypatch):
    """All others of its tenant, of weight 10 with steps of 1,280 tokens, are to end soon, and never do."""
    for name, tokens in (("QUANTUM", 64), ("LEAD", 64), ("CREDIT", 256)):
        monkeypatch.setattr(ledger_turns, name, tokens)
    world = Simulation(book, places=8, step={"h": 1280, "l": 8})
    for number in range(100):
        world.post(f"heavy-{number}", weight=10, deadline=time.time() + 3600)
    world.post("light")
    world.run(1001 * 400)
    assert 400 - world.tokens["/light"] <= 64 + 64 + 128 + 8  # LEAD, QUANTUM, a step of each
    heavy = [world.tokens[f"/heavy-{number}"] for number in range(100)]
    assert max(heavy) - min(heavy) <= 10 * (64 + 64 + 128)


def test_deadlines_of_a_tenant_take_nothing_from_another(book, small_quanta):
    world = Simulation(book, places=2, step={"m": 64, "o": 64})
    for number in range(4):
        world.post(f"many-{number}", tenant="acme", deadline=time.time() + 3600)
    world.post("one", tenant="bell")
    world.run(30_000)
    acme = sum(count for name, count in world.tokens.items() if name.startswith("acme/"))
    taken = 512 // 16 * (5 + world.swaps)
    assert abs(acme - world.tokens["bell/one"]) <= 512 + 64 + taken < 6_000


def test_a_tenant_with_one_adapter_has_as_much_as_one_with_twenty(book, small_quanta):
    world = Simulation(book, places=4, step={"m": 512, "o": 128})
    for number in range(20):
        world.post(f"many-{number}", tenant="acme")
    world.post("one", tenant="bell")
    world.run(60_000)
    acme = sum(count for name, count in world.tokens.items() if name.startswith("acme/"))
    taken = 512 // 16 * (21 + world.swaps)  # what being taken counted as
    assert abs(acme - world.tokens["bell/one"]) <= 2 * 512 + taken < 0.1 * 60_000
    each = [world.tokens[f"acme/many-{number}"] for number in range(20)]
    assert max(each) - min(each) <= 2 * 512 + 512


def test_a_tenant_of_weight_3_has_three_times_as_much(tmp_path, small_quanta):
    with closing(Ledger(tmp_path / "ledger.db", weights=lambda tenant: 3 if tenant == "acme" else 1)) as book:
        world = Simulation(book, places=2, step={"a": 64, "b": 64})
        for name in ("a-1", "a-2", "a-3"):
            world.post(name, tenant="acme")
        world.post("b-1", tenant="bell")
        world.run(40_000)
    acme = sum(count for name, count in world.tokens.items() if name.startswith("acme/"))
    taken = 512 // 16 * (4 + world.swaps)
    assert abs(acme - 3 * world.tokens["bell/b-1"]) <= 3 * (512 + 64 + taken) < 10_000


def test_who_comes_late_begins_soon_and_gets_nothing_for_the_time_before(book, small_quanta):
    world = Simulation(book, places=2, step={"a": 64, "b": 64, "l": 64})
    for name in ("a-1", "b-1"):
        world.post(name)
    world.run(100_000)
    world.post("late")
    world.run(2 * 512 + 256)
    assert world.tokens["/late"] > 0  # after a quantum of the others
    before = world.tokens.copy()
    world.run(30_000)
    had = (world.tokens - before).values()
    assert max(had) - min(had) <= 2 * 512


def test_who_was_slow_is_never_more_than_a_credit_behind(book):
    """Two adapters, of which one makes no steps for long although it has a place."""
    one, two = post(book, "slow"), post(book, "quick")
    leases = {lease.job.id: lease for lease in (take(book), take(book))}
    for _ in range(10):
        book.progress(leases[two], phase="training", tokens=CREDIT)
    book.progress(leases[one], phase="training", tokens=1)
    slow, quick = book.standings()[1]
    assert (slow.job, quick.job) == (one, two)
    assert quick.leads(slow) == CREDIT - 1


def test_small_jobs_without_end_that_have_none_beside_them_are_not_free(book):
    """A tenant posts jobs of a token that keep all others waiting: between two of them others have a quantum each."""
    view = book.of("acme")
    for name in ("x", "y"):
        submit(view, adapter=name, config={"lora_dropout": 0.1})
    post(book, "math")
    first = take(book)
    assert (first.job.tenant, first.job.adapter) == ("acme", "x")
    book.progress(first, phase="training", tokens=1)
    book.published(first, "x@1")
    mine = take(book)
    assert mine.job.adapter == "math"
    waiting, running = book.standings()
    assert waiting is not None and waiting.tenant == "acme"
    assert makes_way(waiting, running) is None
    book.progress(mine, phase="training", tokens=2 * QUANTUM)
    waiting, running = book.standings()
    assert waiting is not None and makes_way(waiting, running) == running[0]


# --- deadlines ---


def due(book: Ledger, adapter: str, seconds: float, base: str | None = None) -> str:
    return submit(book, adapter=adapter, config={"base_adapter": base}, deadline=time.time() + seconds).id


def ahead(book: Ledger, id: str, tokens: int) -> None:
    """An adapter has had so many tokens more than others, and its next job waits."""
    lease = take(book)
    assert lease.job.id == id
    book.progress(lease, phase="training", tokens=tokens)
    book.published(lease, f"{lease.job.adapter}@1")


def test_the_earliest_deadline_goes_first(book):
    plain, late, early = post(book, "a"), due(book, "b", 3600), due(book, "c", 60)
    assert [take(book).job.id for _ in range(3)] == [early, late, plain]


def test_a_deadline_that_has_passed_counts_for_nothing(book):
    plain, missed = post(book, "a"), due(book, "b", -1)
    assert [take(book).job.id for _ in range(2)] == [plain, missed]


def test_what_a_job_with_a_deadline_waits_for_goes_first_with_it(book):
    plain, base, first = post(book, "a"), post(book, "base-of-it"), post(book, "b", "base-of-it")
    second = due(book, "b", 60)
    assert take(book).job.id == base
    assert take(book).job.id == plain  # what b waits for is being trained
    assert book.lease("w") is None
    assert [book.job(id).state for id in (first, second)] == [JobState.QUEUED] * 2


def test_who_is_further_ahead_than_a_lead_has_no_more_from_a_deadline(book):
    plain = post(book, "a")
    ahead(book, due(book, "b", 60), LEAD - QUANTUM)
    ahead(book, due(book, "c", 60), LEAD + QUANTUM)
    far, near = due(book, "c", 60), due(book, "b", 90)
    assert [take(book).job.id for _ in range(3)] == [near, plain, far]


def test_a_deadline_brings_nothing_before_another_tenant(book):
    submit(book.of("acme"), adapter="x")
    first = take(book)
    book.progress(first, phase="training", tokens=QUANTUM)
    mine, theirs = post(book, "math"), due(book.of("acme"), "y", 60)
    assert [take(book).job.id for _ in range(2)] == [mine, theirs]


def test_others_make_way_for_a_deadline_and_it_makes_way_a_lead_later(book):
    others = post(book, "a")
    lease = take(book)
    soon = due(book, "b", 60)
    waiting, running = book.standings()
    assert waiting.job == soon and makes_way(waiting, running) == running[0] and running[0].job == others
    book.release(lease, made_way=True)
    mine = take(book)
    assert mine.job.id == soon
    for tokens, makes in ((LEAD, None), (QUANTUM + 1, soon)):
        book.progress(mine, phase="training", tokens=tokens)
        waiting, running = book.standings()
        first = makes_way(waiting, running)
        assert waiting.job == others and (first and first.job) == makes


def test_the_first_of_those_that_are_a_quantum_ahead_makes_way():
    def at(clock: float, own: float, tenant: str = "") -> Standing:
        return Standing(f"{tenant}{clock}{own}", tenant, "a", clock, own)

    waiting = at(QUANTUM, 100)
    assert makes_way(waiting, []) is None
    assert makes_way(waiting, [at(QUANTUM, 99 + QUANTUM)]) is None
    assert makes_way(waiting, [at(0, 100 + QUANTUM), at(0, 200 + QUANTUM)]) == at(0, 200 + QUANTUM)
    assert makes_way(waiting, [at(QUANTUM + 9, 10**9, "acme")]) is None  # another tenant's adapters are its affair
    assert makes_way(waiting, [at(2 * QUANTUM, 0, "acme")]) == at(2 * QUANTUM, 0, "acme")
