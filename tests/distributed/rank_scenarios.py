"""What ranks do in the tests of ranks, exchanges and metric rules; run in processes by `helpers_ranks`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from helpers_ranks import run_cases

import hookline
from hookline.distributed import Exchange, gather_objects, is_distributed, rank_count, this_rank
from hookline.distributed.reduce import NamedPart, reduce_records
from hookline.errors import RankError


def refused(call: Any) -> str:
    """Return the text of the RankError that ``call`` raises."""
    try:
        call()
    except RankError as error:
        return f"{error} {error.ranks}"
    return "nothing was raised"


# -- ranks that go together ----------------------------------------------------------------------------------


def who_is_who() -> Any:
    return this_rank(), rank_count(), is_distributed(), gather_objects(this_rank() * 10, what="numbers")


def other_words() -> Any:
    return refused(lambda: gather_objects(1, what=f"thing {this_rank()}"))


def sums_and_maxima() -> Any:
    """Two names on both ranks, one of which is replicated, and one on a single rank; then one more name."""
    rank = this_rank()
    exchange = Exchange("sums")
    parts = [NamedPart("both", 2, 1), NamedPart("same", 1, 1, "replicated")]
    added, kept = [1.0 + rank, 2.0**53 + 2 * rank, 7.0], [np.nan if rank else 5.0, -3.0]
    if rank:
        parts.append(NamedPart("second only", 1, 2))
        added.append(4.0)
        kept += [-np.inf, 2.0]
    found = []
    for turn in range(2):
        if turn and not rank:  # what was said before no longer holds, on one rank
            parts.append(NamedPart("late", 1, 0))
            added.append(11.0)
        reduced = exchange.reduce(parts, np.array(added), np.array(kept))
        found.append(
            {
                name: (reduced.added[held.added].tolist(), reduced.kept[held.kept].tolist(), held.ranks, held.shards)
                for name, held in reduced.holdings.items()
            }
        )
    return found


def replicas_with_infinity() -> Any:
    """A sum that has overflowed on both ranks, which hold the same."""
    reduced = Exchange("replicas").reduce([NamedPart("a", 2, 0, "all")], np.array([np.inf, 3.0]), np.zeros(0))
    return reduced.added.tolist()


def by_rules() -> Any:
    rank = this_rank()
    rules = {"m": "mean", "s": "sum", "big": "max", "low": "min", "l": "l2", "c": "concat", "one": "sum", "v": "sum"}
    metrics: dict[str, Any] = {
        **{"m": 1.0 + rank, "s": 3 + rank, "big": rank, "low": -rank, "l": 3.0 + rank, "c": f"r{rank}", "n": rank},
        "v": [1.0, rank],
    }
    if rank:
        metrics["one"] = 8.0
    return reduce_records(gather_objects(metrics, what="metrics"), lambda name: rules.get(name, "none"))


def lists_of_two_lengths() -> Any:
    records = gather_objects({"a": [1.0] * (1 + this_rank())}, what="metrics")
    return refused(lambda: reduce_records(records, lambda name: "mean"))


def other_options() -> Any:
    exchange = Exchange("watch", {"stats": ("mean", "max") if this_rank() else ("mean",), "target": "*"})
    return refused(lambda: exchange.reduce([], np.zeros(0), np.zeros(0)))


def other_sizes() -> Any:
    parts = [NamedPart("a", 1 + this_rank(), 0)]
    return refused(lambda: Exchange("sizes").reduce(parts, np.ones(1 + this_rank()), np.zeros(0)))


CASES = [
    *(
        who_is_who,
        other_words,
        sums_and_maxima,
        replicas_with_infinity,
        by_rules,
        lists_of_two_lengths,
    ),
    *(other_options, other_sizes),
]


def all_together() -> dict[str, Any]:
    """Run every case above; the connection is whole afterwards."""
    return {**run_cases(CASES), "afterwards": gather_objects("well", what="the end")}


# -- ranks that do not come ----------------------------------------------------------------------------------


def one_stays_away() -> Any:
    """Rank 1 reads its watch once less than rank 0; it waits until rank 0 has said so."""
    os.environ["HOOKLINE_RANK_TIMEOUT"] = "2"
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    watch = hookline.watch(model, on="forward")
    model(torch.ones(1, 2))
    for _ in range(2):
        watch.to_metrics()
    if this_rank():
        dist.recv(torch.zeros(1), src=0)
        return refused(watch.to_metrics)
    first = refused(watch.to_metrics)
    again = refused(lambda: gather_objects(0, what="more"))
    dist.send(torch.zeros(1), dst=1)
    return first, again, len(watch.to_metrics(local=True))


def crossed() -> Any:
    """Each rank reduces something else at the same time, with another number of names; then a hook keeps one rank."""
    os.environ["HOOKLINE_RANK_TIMEOUT"] = "6"
    one, two = Exchange("watch of the encoder"), Exchange("watch of the decoder")
    for exchange, count in ((one, 3), (two, 500)):
        exchange.reduce([NamedPart("a", count, 0)], np.ones(count), np.zeros(0))
    exchange, count = (one, 3) if this_rank() else (two, 500)
    met = refused(lambda: exchange.reduce([NamedPart("a", count, 0)], np.ones(count), np.zeros(0)))
    afterwards = one.reduce([NamedPart("a", 3, 0)], np.ones(3), np.zeros(0)).added.tolist()
    kept = refused(_blocked_in_a_hook)
    if this_rank() == 0:
        dist.send(torch.zeros(1), dst=1)
    return met, afterwards, kept


class Blocks(hookline.TrainingHook):
    """Waits, on rank 1, until rank 0 says that it has given up."""

    name = "blocks"
    hook_points = {hookline.HookPoint.POST_STEP}

    def compute(self, ctx: Any) -> None:
        if this_rank() == 1 and ctx.step == 0:
            dist.recv(torch.zeros(1), src=0)


def _blocked_in_a_hook() -> None:
    model = torch.nn.Linear(2, 1)  # without DDP, whose own collective would wait first
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hookline.follow(model, optimizer, [Blocks()], sinks=[]):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
