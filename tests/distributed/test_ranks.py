"""Ranks: who is who, numbers of all ranks as one, and errors that name ranks. Two real processes over gloo."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers_nets import refused
from helpers_ranks import RankTests, run_ranks

import hookline as hl
from hookline.distributed import Exchange, gather_objects, is_distributed, rank_count, this_rank
from hookline.distributed.reduce import NamedPart, check_rule, reduce_records
from hookline.errors import OptionError

on_ranks = RankTests(__file__)


@on_ranks.case
def test_each_rank_knows_itself_and_receives_from_all():
    """Ranks, their number, and one object of each."""
    assert (this_rank(), rank_count(), is_distributed()) == (dist.get_rank(), 2, True)
    assert gather_objects(this_rank() * 10, what="numbers") == [0, 10]


@on_ranks.case
def test_sums_and_maxima_are_those_of_all_ranks():
    """Counts beyond 2**53 stay even numbers, NaN survives a maximum, replicas count once, absent names cost nothing.

    Two names on both ranks, one of which is replicated, and one on a single rank; then one more name.
    """
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
    first, second = found
    assert first["both"][0] == [3.0, 2.0**54 + 2]
    assert np.isnan(first["both"][1]).all()
    assert first["same"] == ([7.0], [-3.0], (0, 1), 1)
    assert first["second only"] == ([4.0], [float("-inf"), 2.0], (1,), 1)
    assert second["late"] == ([11.0], [], (0,), 1)


@on_ranks.case
def test_replicas_count_once():
    """Also where a sum has overflowed on both ranks, of which two would be the same and none would be NaN."""
    reduced = Exchange("replicas").reduce([NamedPart("a", 2, 0, "all")], np.array([np.inf, 3.0]), np.zeros(0))
    assert reduced.added.tolist() == [float("inf"), 3.0]


@on_ranks.case
def test_metrics_are_reduced_by_their_rules():
    """Seven rules; a metric of one rank reaches all."""
    rank = this_rank()
    rules = {"m": "mean", "s": "sum", "big": "max", "low": "min", "l": "l2", "c": "concat", "one": "sum", "v": "sum"}
    metrics: dict[str, Any] = {
        **{"m": 1.0 + rank, "s": 3 + rank, "big": rank, "low": -rank, "l": 3.0 + rank, "c": f"r{rank}", "n": rank},
        "v": [1.0, rank],
    }
    if rank:
        metrics["one"] = 8.0
    found = reduce_records(gather_objects(metrics, what="metrics"), lambda name: rules.get(name, "none"))
    assert found == {
        **{"m": 1.5, "s": 7, "big": 1, "low": -1, "l": 5.0, "c": ["r0", "r1"], "n": 0, "one": 8.0},
        "v": [2.0, 1.0],
    }


def lists_of_two_lengths() -> None:
    reduce_records(gather_objects({"a": [1.0] * (1 + this_rank())}, what="metrics"), lambda name: "mean")


def other_sizes() -> None:
    size = 1 + this_rank()
    Exchange("sizes").reduce([NamedPart("a", size, 0)], np.ones(size), np.zeros(0))


MISFITS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "words": (lambda: gather_objects(1, what=f"thing {this_rank()}"), ["rank 0: thing 0", "rank 1: thing 1"]),
    "lengths": (lists_of_two_lengths, ["'a' is a list of 1 and 2 values", "concat"]),
    "sizes": (other_sizes, ["'a' has not the same size", "2 + 0 numbers on rank 1"]),
}


@on_ranks.case(what=list(MISFITS))
def test_ranks_that_do_not_fit_together_all_hear_it(what):
    """Every rank raises the same error, which names the rank and the difference; the connection is whole afterwards."""
    call, words = MISFITS[what]
    text = refused(call)
    assert [word for word in words if word not in text] == [], text
    assert "target" not in text
    assert gather_objects(text, what="the end") == [text, text]


def one_stays_away() -> None:
    """Rank 1 reads its watch once less than rank 0; it waits until rank 0 has said so."""
    os.environ["HOOKLINE_RANK_TIMEOUT"] = "2"
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    watch = hl.watch(model, on="forward")
    model(torch.ones(1, 2))
    for _ in range(2):
        watch.to_metrics()
    if this_rank():
        dist.recv(torch.zeros(1), src=0)
        assert "watch of Sequential" in refused(watch.to_metrics)
        return
    first, again = refused(watch.to_metrics), refused(lambda: gather_objects(0, what="more"))
    dist.send(torch.zeros(1), dst=1)
    assert "Rank 1 did not come within 2 s: rank 0 was at 'watch of Sequential'" in first
    assert "lost each other before" in again
    assert watch.to_metrics(local=True)


def test_a_rank_that_stays_away_is_named():
    """After the time-out the rank that came knows who did not; later calls do not wait again, its numbers are there."""
    run_ranks(one_stays_away)


class Blocks(hl.TrainingHook):
    """Waits, on rank 1, until rank 0 says that it has given up."""

    name = "blocks"
    hook_points = {hl.HookPoint.POST_STEP}

    def compute(self, ctx: Any) -> None:
        if this_rank() == 1 and ctx.step == 0:
            dist.recv(torch.zeros(1), src=0)


def blocked_in_a_hook() -> None:
    model = torch.nn.Linear(2, 1)  # without DDP, whose own collective would wait first
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.follow(model, optimizer, [Blocks()], sinks=[]):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def crossed() -> None:
    """Each rank reduces something else at the same time, with another number of names; then a hook keeps one rank."""
    os.environ["HOOKLINE_RANK_TIMEOUT"] = "6"
    one, two = Exchange("watch of the encoder"), Exchange("watch of the decoder")
    for exchange, count in ((one, 3), (two, 500)):
        exchange.reduce([NamedPart("a", count, 0)], np.ones(count), np.zeros(0))
    exchange, count = (one, 3) if this_rank() else (two, 500)
    met = refused(lambda: exchange.reduce([NamedPart("a", count, 0)], np.ones(count), np.zeros(0)))
    assert "rank 0: watch of the decoder; rank 1: watch of the encoder" in met
    assert one.reduce([NamedPart("a", 3, 0)], np.ones(3), np.zeros(0)).added.tolist() == [2.0, 2.0, 2.0]
    kept = refused(blocked_in_a_hook)
    if this_rank() == 0:
        dist.send(torch.zeros(1), dst=1)
        assert "Rank 1 did not come within 6 s: rank 0 was at 'metrics of steps'" in kept
        assert re.search(r"hooks: .*\bblocks\b", kept)
    assert "metrics of steps" in kept


def test_ranks_that_do_different_things_end_with_an_error():
    """Where they reduce different things nobody waits for the time-out, and the ranks are still connected.

    Where a hook waits at a step on rank 1, rank 0 names the rank and the hooks that it may be in; rank 1 learns what
    happened as soon as its hook returns.
    """
    run_ranks(crossed)


def test_without_ranks_everything_is_this_process(monkeypatch):
    """No process group: one rank, nothing gathered; before init_process_group the variables of torchrun count."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (this_rank(), rank_count(), is_distributed(), gather_objects(5, what="five")) == (0, 1, False, [5])
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (this_rank(), rank_count(), is_distributed()) == (3, 8, False)


def test_an_unknown_rule_is_refused():
    """The error has the nearest rule."""
    with pytest.raises(OptionError, match="did you mean 'mean'"):
        check_rule("meen")
