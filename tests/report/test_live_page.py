"""The page of a run that goes on: who is answered, and what a reader sees in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_page import CARD, drawn, until
from helpers_report import facts, loss_at, small_run
from helpers_waiting import PATIENCE
from helpers_warm import WarmPopen

from hookline.report.live_runs import LiveRuns
from hookline.report.live_server import LiveServer
from hookline.sinks.record_log import RecordLog
from hookline.sinks.sink import Record, StepSeries


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    """A server of one run that is going on, in a thread; in the end none is left."""
    small_run(tmp_path / "run", facts_of=facts(status="running"))
    before = set(threading.enumerate())
    made = LiveServer(LiveRuns([tmp_path / "run"], share=1.0))
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.stop()
    thread.join()
    made.close()
    made.close()
    assert set(threading.enumerate()) <= before


def _ask(server: LiveServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    host, port = server.address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_only_this_machine_with_the_token_is_told_of_the_run(server: LiveServer, tmp_path: Path) -> None:
    """No other name, origin, site or method; no path leads to a file; the page itself says nothing of the run."""
    token = {"Authorization": f"Bearer {server.token}"}
    with socket.create_connection(server.address.removeprefix("http://").split(":"), timeout=PATIENCE):  # says nothing
        status, data = _ask(server, "/data", **token)
        assert (status, data[:2]) == (200, b"\x1f\x8b")
        assert _ask(server, "/data?since=1", **token) == (204, b"")
        assert [_ask(server, f"/data?since={odd}", **token)[0] for odd in ("%C2%B2", "-1", "9" * 40, "")] == [200] * 4
        assert _ask(server, "/data", **token, Host="localhost:1")[0] == 200  # through a tunnel
        for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {server.token}"}):
            assert _ask(server, "/data", **wrong)[0] == 401
        for wrong in (
            {"Host": "evil.example"},
            {"Host": "127.0.0.1.evil.example"},
            {"Host": ""},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec_Fetch_Site": "cross-site"},
        ):
            assert _ask(server, "/data", **token, **wrong)[0] == 403
        for path in ("/records.jsonl", "/../run.json", "/data/..%2frun.json", "//etc/passwd", "/%2e%2e/run.json"):
            assert _ask(server, path, **token)[0] == 404
        assert _ask(server, "/data", "POST", **token)[0] == 501
        status, page = _ask(server, "/")
        assert status == 200
        assert not any(text in page for text in (server.token.encode(), b"SmallTransformer", str(tmp_path).encode()))


def test_what_comes_is_drawn_by_itself(visit: Callable[..., Any], server: LiveServer, tmp_path: Path) -> None:
    """The token leaves the address; curves grow, zoom, window and keyboard stay; a run that is killed has no news."""
    log_path = tmp_path / "run" / "records.jsonl"
    opened = visit(server.address)
    page = opened.page
    page.goto(server.address)  # as one who was sent the address without the token
    page.wait_for_selector("#token")
    assert page.evaluate("document.activeElement.id") == "token"
    page.keyboard.type(server.url)
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-ready]", state="attached", timeout=1000 * PATIENCE)
    assert "token" not in page.url
    assert page.inner_text("#news") == "Live: new records appear here by themselves."
    card = CARD.format("train/loss")
    assert len(drawn(page, card)[0]["x"]) == 200
    page.evaluate("s => Plotly.relayout(document.querySelector(s), {'xaxis.range': [10, 90]})", card)
    page.focus("button[aria-label='Open train/loss']")
    log = RecordLog(log_path)
    steps = range(200, 250)
    grown = {"train/loss": StepSeries([loss_at(step) for step in steps], steps)}
    log.append(Record(grown, 4, "POST_STEP", 249, "default"))
    with log_path.open("ab") as file:
        file.write(b'{"n":13,"time')  # the next one is being written
    until(page, "s => document.querySelector(s).data[0].x.length === 250", card)
    assert page.evaluate("s => document.querySelector(s)._fullLayout.xaxis.range", card) == [10, 90]
    assert page.evaluate("document.activeElement.ariaLabel") == "Open train/loss"
    page.keyboard.press("Enter")
    page.wait_for_selector("#focus[open]")
    log.close()
    log = RecordLog(log_path)  # the run was killed and goes on; a metric is new
    log.append(Record({"train/loss": float("nan"), "new/metric": 1.0}, 5, "POST_STEP", 250, "default"))
    log.close()
    os.utime(log_path, (1.79e9, 1.79e9))
    until(page, "document.querySelector('#news').textContent.startsWith('No news since ')")
    until(page, "document.querySelectorAll('article[data-metric=\"new/metric\"]').length === 1")
    assert "251 points, last NaN" in page.inner_text("#focus-about")
    assert "NaN or Inf" in page.inner_text("#findings")
    page.keyboard.press("Escape")
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts()))
    until(page, "document.querySelector('#news').textContent === 'All runs have ended.'")
    assert page.inner_text("h1 .status") == "finished"
    page.goto("about:blank")  # before the server ends, which the browser would complain of


def test_the_command_prints_an_address_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    """Also for a folder in which nothing has begun; with exit code 0 and no traceback."""
    process = WarmPopen(
        [sys.executable, "-m", "hookline", "report", "--live", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    assert "Ctrl-C" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "Ended.\n", "")
