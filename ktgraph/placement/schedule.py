"""Tasks on lanes: when each starts, in a given order or in the order that list scheduling chooses.

A lane runs one task at a time: a device's compute stream, or one direction of a link.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx


@dataclass(frozen=True)
class Task:
    """Work of `seconds` on a lane, not before the tasks numbered in `after` have ended."""

    name: str
    lane: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """Start of every task, and the order in which they were given to their lanes."""

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    order: tuple[int, ...]

    def end(self, number: int) -> float:
        return self.starts[number] + self.tasks[number].seconds

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max(map(self.end, range(len(self.tasks))), default=0.0)

    def busy(self, lane: str) -> float:
        """Seconds that a lane works."""
        return sum(t.seconds for t in self.tasks if t.lane == lane)

    @property
    def lanes(self) -> list[str]:
        return list(dict.fromkeys(t.lane for t in self.tasks if t.seconds > 0))


def in_order(tasks: Sequence[Task]) -> Schedule:
    """Every lane runs its tasks in the order of the list."""
    free: dict[str, float] = {}
    starts: list[float] = []
    for task in tasks:
        ready = max((starts[n] + tasks[n].seconds for n in task.after), default=0.0)
        starts.append(max(ready, free.get(task.lane, 0.0)) if task.seconds > 0 else ready)
        if task.seconds > 0:
            free[task.lane] = starts[-1] + task.seconds
    return Schedule(tuple(tasks), tuple(starts), tuple(range(len(tasks))))


def tails(tasks: Sequence[Task]) -> list[float]:
    """Seconds from a task's start to the end of the longest chain that it begins."""
    found = [t.seconds for t in tasks]
    for number in reversed(range(len(tasks))):
        for before in tasks[number].after:
            found[before] = max(found[before], tasks[before].seconds + found[number])
    return found


def list_schedule(tasks: Sequence[Task]) -> Schedule:
    """Whenever a lane is free it takes the ready task with the longest tail; ties in list order.

    Tasks come in an order in which `after` points backwards.
    """
    rank = tails(tasks)
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(number)
    waiting = [len(t.after) for t in tasks]
    starts = [0.0] * len(tasks)
    free: dict[str, float] = {}
    order: list[int] = []
    # (earliest start, -tail, number): the earliest start first, among equals the longest tail
    ready = [(0.0, -rank[n], n) for n, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    while ready:
        start, priority, number = heapq.heappop(ready)
        task = tasks[number]
        begin = max(start, free.get(task.lane, 0.0)) if task.seconds > 0 else start
        if begin > start:
            heapq.heappush(ready, (begin, priority, number))
            continue
        starts[number] = begin
        order.append(number)
        if task.seconds > 0:
            free[task.lane] = begin + task.seconds
        for follower in followers[number]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                at = max(starts[n] + tasks[n].seconds for n in tasks[follower].after)
                heapq.heappush(ready, (at, -rank[follower], follower))
    return Schedule(tuple(tasks), tuple(starts), tuple(order))


def task_graph(tasks: Sequence[Task]) -> nx.DiGraph[int]:
    """The tasks as a graph: nodes are numbers, an edge's weight is the time of its source."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    for number, task in enumerate(tasks):
        graph.add_node(number, name=task.name, lane=task.lane, seconds=task.seconds)
        for before in task.after:
            graph.add_edge(before, number, weight=tasks[before].seconds)
    return graph


def critical_path(tasks: Sequence[Task]) -> list[int]:
    """Numbers of the longest chain of tasks that wait for each other, lanes left aside."""
    if not tasks:
        return []
    graph = task_graph(tasks)
    end = len(tasks)
    graph.add_node(end, name="end", lane="", seconds=0.0)
    for number, task in enumerate(tasks):
        graph.add_edge(number, end, weight=task.seconds)
    path: Any = nx.dag_longest_path(graph)  # pyright: ignore[reportUnknownMemberType]
    return [int(n) for n in path[:-1]]


def waiting_chain(schedule: Schedule) -> list[int]:
    """From the task that ends last back to the start: each time what it waited for.

    That is a task in `after`, or the one before it on its lane.  Their seconds add up to the
    makespan.
    """
    tasks, starts = schedule.tasks, schedule.starts
    before: dict[int, int] = {}  # of tasks that take time: the one before on the lane
    last: dict[str, int] = {}
    for number in schedule.order:
        if tasks[number].seconds > 0:
            if tasks[number].lane in last:
                before[number] = last[tasks[number].lane]
            last[tasks[number].lane] = number
    chain: list[int] = []
    number = max(range(len(tasks)), key=schedule.end, default=None)
    while number is not None:
        chain.append(number)
        held = [*tasks[number].after, *([before[number]] if number in before else [])]
        waited = [n for n in held if starts[number] > 0]
        number = max(waited, key=schedule.end, default=None)
    return chain[::-1]


__all__ = [
    "Schedule",
    "Task",
    "critical_path",
    "in_order",
    "list_schedule",
    "tails",
    "task_graph",
    "waiting_chain",
]
