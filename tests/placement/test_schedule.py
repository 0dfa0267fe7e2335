"""Lanes and list scheduling against every possible order."""

import random
from itertools import pairwise, permutations

import pytest

from ktgraph.placement.schedule import (
    Schedule,
    Task,
    critical_path,
    in_order,
    list_schedule,
    tails,
    waiting_chain,
)


def test_in_order_keeps_lanes_and_dependencies() -> None:
    tasks = [
        Task("a", "gpu", 2.0),
        Task("b", "cpu", 5.0, (0,)),
        Task("c", "gpu", 3.0, (0,)),
        Task("d", "gpu", 1.0, (1, 2)),
    ]
    found = in_order(tasks)
    assert found.starts == (0.0, 2.0, 2.0, 7.0)
    assert found.makespan == 8.0
    assert found.busy("gpu") == 6.0
    assert found.lanes == ["gpu", "cpu"]
    assert critical_path(tasks) == [0, 1, 3]
    assert tails(tasks) == [8.0, 6.0, 4.0, 1.0]


def test_host_work_starts_before_what_nobody_waits_for() -> None:
    tasks = [
        Task("shared", "gpu", 4.0),
        Task("post", "gpu", 1.0),
        Task("experts", "cpu", 6.0, (1,)),
        Task("add", "gpu", 1.0, (0, 2)),
    ]
    assert in_order(tasks).makespan == 12.0
    found = list_schedule(tasks)
    assert found.makespan == 8.0
    assert found.order.index(1) < found.order.index(0)


@pytest.mark.parametrize("seed", range(20))
def test_list_schedule_is_valid_and_near_the_best_order(seed: int) -> None:
    tasks = _random_tasks(random.Random(seed), 7)
    found = list_schedule(tasks)
    _check(found)
    best = min(in_order(t).makespan for t in _orders(tasks))
    assert best - 1e-9 <= found.makespan <= 1.25 * best


def _random_tasks(rng: random.Random, count: int) -> list[Task]:
    tasks: list[Task] = []
    for number in range(count):
        after = tuple(n for n in range(number) if rng.random() < 0.3)
        tasks.append(Task(str(number), rng.choice("ab"), rng.uniform(0.5, 4), after))
    return tasks


def _orders(tasks: list[Task]) -> list[list[Task]]:
    found: list[list[Task]] = []
    for order in permutations(range(len(tasks))):
        place = {n: i for i, n in enumerate(order)}
        if all(place[b] < place[n] for n in order for b in tasks[n].after):
            found.append(
                [
                    Task(tasks[n].name, tasks[n].lane, tasks[n].seconds,
                         tuple(place[b] for b in tasks[n].after))
                    for n in order
                ]
            )  # fmt: skip
    return found


def _check(found: Schedule) -> None:
    for number, task in enumerate(found.tasks):
        assert all(found.end(b) <= found.starts[number] + 1e-12 for b in task.after)
    for lane in found.lanes:
        spans = sorted(
            (found.starts[n], found.end(n)) for n, t in enumerate(found.tasks) if t.lane == lane
        )
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_waited_for_adds_up_to_the_makespan(seed: int) -> None:
    """Over lanes and operands, also through tasks that take no time."""
    rng = random.Random(seed)
    tasks: list[Task] = []
    for number in range(40):
        before = tuple(rng.sample(range(number), min(number, rng.randint(0, 3))))
        seconds = rng.choice([0.0, 0.5, 1.0, 2.25])
        tasks.append(Task(str(number), rng.choice("abc"), seconds, before))
    for schedule in (in_order(tasks), list_schedule(tasks)):
        chain = waiting_chain(schedule)
        assert sum(tasks[n].seconds for n in chain) == schedule.makespan
        assert schedule.starts[chain[0]] == 0.0
        for first, second in pairwise(chain):
            assert schedule.end(first) == schedule.starts[second]


def test_an_empty_schedule_waits_for_nothing() -> None:
    assert waiting_chain(in_order([])) == []
