"""``hookline serve`` as a process: files, flags, signals, and that nothing flushed is lost."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from helpers_http import SLOW, TOKEN, ServerProcess
from helpers_waiting import PATIENCE, until

from hookline.cli.main import main
from hookline.cli.serve import serve

EXPORT = {"name": "states", "target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:export"}


def _write(path: Path, value: Any) -> str:
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_sigterm_under_load_finishes_what_runs_and_loses_no_record(folder: Path, tmp_path: Path) -> None:
    """Hooks of both files are on; after SIGTERM in the middle of eight answers, every one of them is whole, every token
    of them is in the export, every forward in the statistics, and the exit code is 0."""
    states = tmp_path / "states"
    arguments = [
        "--model", str(folder), "--served-model-name", "small", "--max-batch", "4", "--no-strict",
        "--server-args", _write(tmp_path / "args.json", {"enable_hooks": True, "tp_size": 1, "hooks": [
            {**EXPORT, "config": {"folder": str(states)}},
            {"name": "typo", "target_modules": ["no.such.*"], "hook_factory": "hookline.factories:nan_alarm"},
        ]}),
        "--hooks", _write(tmp_path / "hooks.json", [{**SLOW, "config": {"seconds": 0.1}}, {
            **EXPORT, "name": "numbers", "hook_factory": "hookline.factories:activation_stats",
            "config": {"log_every": 3600},
        }]),
    ]  # fmt: skip
    with ServerProcess(*arguments, HOOKLINE_SERVE_TOKEN=TOKEN) as server:
        url = server.url()
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "small"
        listed = httpx.get(f"{url}/hooks").json()["hooks"]
        assert [hook["name"] for hook in listed] == ["states", "slow", "numbers"]
        assert "No modules matched hook spec 'typo' patterns=['no.such.*']" in server.said
        assert "Registered forward hook 'states' on model.layers.0" in server.said
        answers = _under_load(url, lambda: server.process.send_signal(signal.SIGTERM))
        assert server.ended() == 0, server.said
        assert "stopped" in server.lines[-1]
    assert [answer.status_code for answer in answers] == [200] * 8
    bodies = [answer.json() for answer in answers]
    assert {body["choices"][0]["finish_reason"] for body in bodies} == {"length"}
    forwards = _check_export(states, bodies)
    assert f"{forwards} forwards" in server.said


def _under_load(url: str, act: Callable[[], None]) -> list[httpx.Response]:
    """Eight clients ask for long answers, four at a time run; something is done when all have been accepted."""
    answers: list[httpx.Response] = []
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}

    def ask(place: int) -> None:
        answers.append(
            httpx.post(f"{url}/v1/completions", json={**body, "prompt": "hook " * (place + 1)}, timeout=PATIENCE)
        )

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()

    def all_accepted() -> bool:
        metrics = httpx.get(f"{url}/metrics").text
        return "hookline_engine_requests_accepted_total 8.0" in metrics

    until(all_accepted, "eight requests are accepted")
    assert not answers  # it is the middle
    act()
    for thread in threads:
        thread.join()
    return answers


def _check_export(folder: Path, bodies: list[dict[str, Any]]) -> int:
    """All tokens of these answers are there; in how many forwards they were."""
    from hookline.factories import read_export

    seen: dict[tuple[str, str], set[int]] = {}
    calls = set()
    for record in read_export(folder):
        calls.add(record.call)
        seen.setdefault((record.request, record.module), set()).update(record.positions)
    for body in bodies:
        positions = set(range(body["usage"]["total_tokens"] - 1))  # the last token goes through no forward
        for layer in ("model.layers.0", "model.layers.1"):
            assert seen[body["id"], layer] == positions
    return len(calls)


_DRAINS_FOR_A_MINUTE = """
import logging, sys, time
from types import SimpleNamespace
from hookline.serve.http.request_gate import Settings
from hookline.serve.http.server import Server

logging.basicConfig(level=logging.INFO, format="%(message)s")
engine = SimpleNamespace(start=lambda: None, close=time.sleep, is_running=True, has_failed=False, counts=dict)
sys.exit(not Server(lambda: engine, Settings(drain_s=60)).serve())
"""


@pytest.mark.slow
def test_a_second_signal_leaves_at_once() -> None:
    """After Ctrl-C it drains, here for a minute; another signal ends the process, and the exit code says by what."""
    with ServerProcess(command=["-c", _DRAINS_FOR_A_MINUTE]) as server:
        url = server.url()
        server.process.send_signal(signal.SIGINT)
        until(lambda: "stopping" in server.said, "it drains")
        until(lambda: httpx.get(f"{url}/health").json() == {"status": "draining"}, "it says so")
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 128 + signal.SIGTERM


# -- what does not start ---------------------------------------------------------------------------------------


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What ``hookline serve`` says as it ends with exit code 2."""

    def fails(*arguments: str) -> str:
        code = main(["serve", "--port", "0", *arguments])
        said = capsys.readouterr().err
        assert code == 2, said
        assert "Traceback" not in said
        return said

    return fails


def test_a_folder_that_is_no_model_ends_with_a_sentence(said: Callable[..., str], tmp_path: Path) -> None:
    """Exit code 2, and what is missing; the file of settings may name the folder, and has its own say."""
    assert "no config.json" in said("--model", str(tmp_path))
    args = _write(tmp_path / "args.json", {"enable_hooks": True, "model_path": str(tmp_path / "nowhere")})
    text = said("--server-args", args)
    assert "nowhere has no config.json" in text
    assert "enable_hooks=True but no 'hooks' specified in server_args" in text


def test_a_model_without_a_tokenizer_is_served_by_ids(folder: Path, tmp_path: Path) -> None:
    """With --no-tokenizer: ids come in and go out, text is refused with the reason; its log begins with loading."""
    copy = tmp_path / "ids"
    shutil.copytree(folder, copy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    with ServerProcess("--model", str(copy), "--no-tokenizer", "--device", "cpu") as server:
        with httpx.Client(base_url=server.url(), timeout=PATIENCE) as client:
            asked = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
            [choice] = client.post("/v1/completions", json=asked).json()["choices"]
            refused = [
                client.post("/v1/completions", json={"prompt": "A hook"}),
                client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "A hook"}]}),
            ]
        assert server.lines[0] == f"hookline: loading {copy}"
    assert (len(choice["token_ids"]), choice["text"]) == (3, "")
    assert choice["logprobs"]["tokens"][0] == f"token_id:{choice['token_ids'][0]}"
    for each in refused:
        assert each.status_code == 400
        assert "served without a tokenizer" in each.json()["error"]["message"]


def test_a_factory_that_cannot_be_found_ends_with_a_sentence(
    said: Callable[..., str], folder: Path, tmp_path: Path
) -> None:
    """Exit code 2; a broken path in a start-up file is not passed over, nor one that --allow leaves out."""
    hooks = _write(tmp_path / "hooks.json", [{**EXPORT, "hook_factory": "no_such_package:factory"}])
    text = said("--model", str(folder), "--hooks", hooks)
    assert "No module named 'no_such_package'" in text
    assert "states" in text
    assert "not allowed; allowed: 'mine'" in said("--model", str(folder), "--hooks", hooks, "--allow", "mine")
    hooks = _write(tmp_path / "hooks.json", [SLOW, {**SLOW, "target_modules": ["model.layer.0"]}])
    text = said("--model", str(folder), "--hooks", hooks)
    assert "No module matches 'model.layer.0'" in text
    assert "nearest: 'model.layers.0'" in text
    assert "hook spec 1 ('slow')" in text
    assert "--no-strict" in text


def test_the_command_checks_its_flags_before_anything_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open address without a token, an empty token, one in the command, a file that is none, an object where a list
    is required, no model, a port that is taken: an error each, in a sentence."""
    from hookline.errors import HooklineError

    monkeypatch.delenv("HOOKLINE_SERVE_TOKEN", raising=False)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    model = ["--model", str(folder)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wrong = {
            "needs a model": [],
            "others may reach": [*model, "--host", "0.0.0.0"],
            "token is empty": [*model, "--token-file", str(empty)],
            "Did you mean '--token-file'": [*model, "--token", "in every list of processes"],
            "--token-file nowhere cannot be read": [*model, "--token-file", "nowhere"],
            "--chat-template nowhere cannot be read": [*model, "--chat-template", "nowhere"],
            "--no-tokenizer serves none": [*model, "--no-tokenizer", "--chat-template", "nowhere"],
            "there is no token": [*model, "--protect", "everything"],
            "hooks: expected a valid list": [*model, "--hooks", _write(tmp_path / "o.json", {"hooks": {"name": "x"}})],
            "Did you mean 'hook_factory'": [*model, "--hooks", _write(tmp_path / "k.json", [{"hook_factry": "x"}])],
            "is not JSON": [*model, "--server-args", str(_text(tmp_path / "b.json", "{"))],
            "Cannot listen at 127.0.0.1": [*model, "--port", str(taken.getsockname()[1])],
        }
        for words, arguments in wrong.items():
            with pytest.raises(HooklineError, match=words):
                serve(arguments)


def _text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_help_comes_without_torch() -> None:
    """``hookline serve --help`` imports neither torch nor anything of the serve extra."""
    code = (
        "import sys; from hookline.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'fastapi', 'uvicorn', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "--token-file" in run.stdout
    assert run.stdout.strip().endswith("[]")


def test_an_engine_that_fails_ends_the_process_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor sees that it has to start another."""
    from hookline.serve.http.server import Server

    def failed(self: Server) -> None:
        self._thread.start()
        self.serving.engine = SimpleNamespace(has_failed=True, close=lambda seconds: None)  # type: ignore[assignment]

    monkeypatch.setattr(Server, "start", failed)
    assert main(["serve", "--model", "anywhere", "--port", "0"]) == 1


def test_a_signal_that_is_lost_while_the_model_loads_still_counts() -> None:
    """Python drops an exception that comes while an object is deleted, and with it the one that a signal raises."""
    from hookline.serve.http.request_gate import Settings
    from hookline.serve.http.server import Server

    done: list[Any] = []

    def make() -> Any:
        with suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
            done.append("nothing was raised")
        return SimpleNamespace(start=lambda: None, close=done.append, is_running=True)

    assert Server(make, Settings(drain_s=7)).serve() is True
    assert done == [7]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_all_addresses_of_the_machine_are_those_of_ipv4_too() -> None:
    from hookline.serve.http.server import _bound

    with _bound("::", 0) as listening, socket.create_connection(("127.0.0.1", listening.getsockname()[1]), PATIENCE):
        pass
