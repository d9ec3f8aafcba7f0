"""`hookline.parity`: a clean pair is called clean, and every planted fault gets its name and place, or "unsure"."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import helpers_parity as helpers
import pytest
import torch
import transformers

import hookline as hl
from hookline.cli.main import main
from hookline.engines.hidden_states import StatesOfLayer
from hookline.factories import stream_of
from hookline.phases import in_phase

SMALL: dict[str, Any] = {"new_tokens": 12}


def _pair(model: Any, precision: str) -> tuple[Any, Any, Any]:
    """Return a trainer, an engine's model, and the trainer in higher precision."""
    if precision == "float32":
        return model, copy.deepcopy(model), None
    return helpers.as_trainer(model), helpers.as_engine(model), helpers.exact(model)


def _found(model: Any, precision: str, plant: Callable[[Any], None] | None = None, **options: Any) -> Any:
    trainer, served, reference = _pair(model, precision)
    if plant is not None:
        plant(served)
    return hl.parity(trainer, served, helpers.prompts(8), reference=reference, **{**SMALL, **options})


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("make", [helpers.llama, helpers.mixture])
def test_a_clean_pair_is_called_clean(make: Any, precision: str) -> None:
    found = _found(make(), precision)
    assert found.ok
    assert found.cause is None or found.cause.name == "router ties"
    assert ("nothing beyond" in found.sentence) is (found.cause is None)
    assert 0.05 < found.gap.rms / found.yardstick < 1.5
    assert found.gap.tokens == 8 * 12


FAULTS = [
    (helpers.stale_layer, "weights", "model.layers.2"),
    (helpers.stale_weight, "weights", "model.layers.1.mlp.down_proj"),
    (helpers.rope_base, "rope", "all layers"),
    (helpers.decode_offset, "positions", "decode"),
    (helpers.temperature, "temperature", "sampling"),
]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("plant", "name", "where"), FAULTS)
def test_a_fault_is_named(plant: Any, name: str, where: str, precision: str) -> None:
    found = _found(helpers.llama(), precision, plant)
    assert not found.ok
    assert found.cause.name == name
    assert found.cause.where.startswith(where)


@pytest.mark.parametrize(("precision", "plant"), [("float32", helpers.head_in_bf16), ("bf16", helpers.head_in_fp8)])
def test_the_head_is_named(precision: str, plant: Any) -> None:
    found = _found(helpers.llama(), precision, plant)
    assert (found.cause.name, found.cause.where) == ("head", "lm_head")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_swapped_experts_are_named(precision: str) -> None:
    found = _found(helpers.mixture(), precision, helpers.swapped_experts)
    assert found.cause.name == "experts"
    assert found.cause.where.startswith("model.layers.1")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_ties_of_a_router_are_named_and_are_no_fault(precision: str) -> None:
    found = _found(helpers.mixture(), precision, helpers.tied_router)
    assert found.is_beyond
    assert found.cause.name == "router ties"
    assert found.ok


def test_a_few_tokens_of_a_mixture_without_states_are_unsure() -> None:
    model = helpers.mixture()
    given: list[dict[str, Any]] = [{"prompt": ids, "completion": [*range(5, 15)]} for ids in helpers.prompts(4)]
    for each in given:
        each["logprobs"] = _at_temperature(model, each, 1.0)
    given[0]["logprobs"][3] -= 0.5
    found = hl.parity(model, None, given)
    assert not found.ok
    assert found.cause is not None
    assert found.cause.where == "unsure"
    assert "routers" in found.cause.text


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_missing_bos_is_named_without_states(precision: str) -> None:
    trainer, served, reference = _pair(helpers.llama(), precision)
    found = hl.parity(trainer, helpers.NoBos(served, 12), helpers.prompts(8), reference=reference)
    assert found.cause.name == "tokens"
    assert not found.layers


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("plant", [None, helpers.stale_layer, helpers.stale_weight, helpers.head_in_fp8])
def test_over_http_without_a_look_at_parameters(plant: Any, precision: str) -> None:
    trainer, served, reference = _pair(helpers.llama(), precision)
    if plant is not None:
        plant(served)
    with helpers.served(served) as url:
        found = hl.parity(trainer, url, helpers.prompts(8), reference=reference, **SMALL)
    layer = "model.layers.2" if precision == "float32" else "unsure"  # its gap is not beyond what bf16 explains
    wheres = {None: None, helpers.stale_layer: layer, helpers.head_in_fp8: "lm_head"}
    assert (found.cause and found.cause.where) == wheres.get(plant, "model.layers.1.mlp.down_proj")
    assert found.ok is (plant is None)


ON_LEARNED = [
    *FAULTS,
    (helpers.head_in_fp8, "head", "lm_head"),
    (helpers.NoBos, "tokens", "first token"),
    (helpers.swapped_experts, "experts", "model.layers.1"),
]


@pytest.fixture(scope="module")
def of_learned() -> Any:
    made = {make: helpers.learned(make(7), steps=300) for make in (helpers.llama, helpers.mixture)}

    def find(plant: Any, precision: str, seed: int) -> Any:
        model = made[helpers.mixture if plant is helpers.swapped_experts else helpers.llama]
        trainer, engine, reference = _pair(model, precision)
        if plant is helpers.NoBos:
            engine = helpers.NoBos(engine, 12)
        elif plant is not None:
            plant(engine)
        return hl.parity(trainer, engine, helpers.texts(8, seed), reference=reference, batch=3, **SMALL)

    return find


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_model_that_has_learned_hears_no_false_alarm_and_no_other_name(of_learned: Any, precision: str) -> None:
    """In bf16 a fault may be below what can be seen."""
    for seed in range(4):
        assert of_learned(None, precision, seed).ok
    for plant, name, where in ON_LEARNED:
        cause = of_learned(plant, precision, 5).cause
        if precision == "bf16" and (cause is None or cause.name == "unsure"):
            continue
        assert cause.name == name, plant
        assert cause.where.startswith(where)


_BARE = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    def find_spec(name, path=None, target=None):
        missing = name.split(".")[0] in ("pydantic", "orjson", "rich", "tyro", "fastapi", "starlette", "uvicorn")
        return None if missing else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
sys.path.append(sys.argv[1])
import hookline as hl
import helpers_parity as helpers
helpers.llama(layers=2).save_pretrained("model")
for engine in ("model", helpers.llama(layers=2)):
    found = hl.parity(helpers.llama(layers=2), engine, helpers.prompts(2), new_tokens=4)
    assert found.ok and found.layers, found
"""


def test_a_model_and_a_folder_need_torch_and_transformers_alone(tmp_path: Path) -> None:
    bare = [sys.executable, "-W", "ignore", "-c", _BARE, str(Path(helpers.__file__).parent)]
    subprocess.run(bare, cwd=tmp_path, check=True)


def test_a_function_gives_states_as_a_session_hands_them_out() -> None:
    """As one does that asks the model runner of SGLang."""
    trainer = helpers.llama()
    served = copy.deepcopy(trainer)
    helpers.stale_weight(served)
    kept: dict[str, Any] = {}
    for name in ("model.embed_tokens", *(f"model.layers.{number}" for number in range(4)), "model.norm"):
        served.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: kept.update({name: stream_of(module, output)[0]})
        )

    def engine(sequences: list[list[int]]) -> Any:
        for ids in sequences:
            with torch.no_grad():
                logits = served(torch.tensor([ids])).logits[0, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            places = [*range(len(ids))]
            yield ids, logprobs.tolist(), {name: StatesOfLayer(places, rows).to_plain() for name, rows in kept.items()}

    found = hl.parity(trainer, engine, helpers.prompts(4))
    assert found.cause is not None
    assert (found.cause.name, found.cause.where) == ("layer", "model.layers.1")


def test_nothing_of_the_trainer_is_changed() -> None:
    trainer = helpers.llama()
    before = {name: value.clone() for name, value in (*trainer.named_parameters(), *trainer.named_buffers())}
    trainer.train()
    stream = torch.get_rng_state()
    served = copy.deepcopy(trainer)
    helpers.rope_base(served)
    hl.parity(trainer, served.eval(), helpers.prompts(4), **SMALL)
    assert trainer.training
    assert torch.equal(torch.get_rng_state(), stream)
    for name, value in (*trainer.named_parameters(), *trainer.named_buffers()):
        assert torch.equal(value, before[name]), name
    assert not any(module._forward_hooks for module in trainer.modules())


def _trained(between: Callable[[Any], object]) -> tuple[Any, list[bool]]:
    """Train for 20 steps with dropout, and one module in eval mode; call `between` now and then."""
    model = helpers.llama().train()
    model.model.norm.eval()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    for step in range(20):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (3, 12):
            between(model)
    return [each.detach().clone() for each in model.parameters()], [each.training for each in model.modules()]


def test_a_training_that_is_compared_on_the_way_ends_with_the_same_bits() -> None:
    """Modes of single modules too; a draw in between, which is not guarded, is noticed."""
    plain, modes = _trained(lambda model: None)
    served = helpers.llama().eval()
    found, after = _trained(lambda model: hl.parity(model, served, helpers.prompts(2), **SMALL))
    assert after == modes
    assert all(map(torch.equal, found, plain))
    drawn, _ = _trained(lambda model: torch.rand(1))
    assert not all(map(torch.equal, drawn, plain))


def test_healthy_numbers_show_smaller_faults(tmp_path: Path) -> None:
    def plant(model: Any) -> None:
        helpers.stale_layer(model, 0.006)

    with helpers.served(_pair(helpers.llama(), "bf16")[1]) as url:
        trainer, served, reference = _pair(helpers.llama(), "bf16")
        first = hl.parity(trainer, url, helpers.prompts(8), reference=reference, **SMALL)
    file = first.save_healthy(tmp_path / "healthy.json")
    plant(served)
    with helpers.served(served) as url:
        alone, known = (
            hl.parity(trainer, url, helpers.prompts(8), reference=reference, healthy=healthy, **SMALL)
            for healthy in (None, file)
        )
    assert alone.cause is None or alone.cause.name == "unsure"
    assert known.cause.where.startswith("model.layers.2")
    with pytest.raises(hl.errors.OptionError, match="another model"):
        hl.parity(helpers.llama(layers=5), None, [{"prompt": [2], "completion": [3], "logprobs": [-1]}], healthy=file)


def _at_temperature(model: Any, given: dict[str, Any], temperature: float) -> list[float]:
    prompt, answer = given["prompt"], given["completion"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / temperature
    found: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
    return found


def test_recorded_logprobs_need_no_engine() -> None:
    model = helpers.llama()
    given: list[dict[str, Any]] = [{"prompt": ids, "completion": [5, 6, 7, 8]} for ids in helpers.prompts(4)]
    for each in given:
        each["logprobs"] = _at_temperature(model, each, 1.0)
    assert hl.parity(model, None, given).ok
    divided = [each | {"logprobs": _at_temperature(model, each, 0.8)} for each in given]
    assert hl.parity(model, None, divided, temperature=0.8).ok
    assert hl.parity(model, None, divided).cause.name == "temperature"
    given[0]["logprobs"] = [each - 0.5 for each in given[0]["logprobs"]]
    found = hl.parity(model, None, given)
    assert not found.ok
    assert math.isclose(found.gap.rms, 0.25, rel_tol=1e-3)
    assert found.worst[0]["sequence"] == 0


@pytest.mark.parametrize(
    ("engine", "sequences", "words"),
    [
        (lambda given: [], [[2, 3]], "it gave"),
        (lambda given: [([*ids, 4], [None]) for ids in given], [[2, 3]], "missing"),
        (lambda given: [([*ids, 9999], [-1.0]) for ids in given], [[2, 3]], "trainer knows"),
        (lambda given: [([2, 7, 8], [-1.0]) for ids in given], [[2, 3]], "chat template"),
        (lambda given: [([*ids, 4], [math.nan]) for ids in given], [[2, 3]], "not finite"),
        (lambda given: [(ids, []) for ids in given], [[2, 3]], "missing"),
        (None, [{"prompt": [2], "completion": [3], "logprobs": [math.nan]}], "not finite"),
        (print, [[]], "Sequence 0"),
        (None, [[2, 3]], "needs a completion"),
        (None, [{"prompt": [2], "completion": [3, 4], "logprobs": [-1.0]}], "2 tokens"),
        (print, ["a text"], "no tokenizer"),
        (print, [[2, 9999]], "below 200, got"),
        (print, [], "no sequences"),
        (print, [[2, 3], {"prompt": [2], "completion": [3], "logprobs": [-1.0]}], "all of one kind"),
        (print, [{"prompt": [2], "completion": [3]}], "0 log-probs"),
        ("http://127.0.0.1:9", [[2, 3]], "does not answer"),
        (7, [[2, 3]], "An engine is"),
    ],
)
def test_what_cannot_be_compared_is_said(engine: Any, sequences: Any, words: str) -> None:
    with pytest.raises(hl.errors.OptionError, match=words):
        hl.parity(helpers.llama(layers=1), engine, sequences)


@pytest.mark.parametrize("size", [64, 300])
@pytest.mark.parametrize("over_http", [False, True])
def test_other_vocabularies_are_refused_before_anything_runs(size: int, over_http: bool) -> None:
    config = transformers.LlamaConfig(vocab_size=size, hidden_size=32, intermediate_size=16, num_hidden_layers=1)
    other = transformers.LlamaForCausalLM(config).eval()
    engines = helpers.served(other) if over_http else nullcontext(other)
    with engines as engine, pytest.raises(hl.errors.OptionError, match="vocabulary"):
        hl.parity(helpers.llama(layers=1), engine, [[2, 3]])


@pytest.mark.parametrize(("owner", "words"), [("hookline", "does not answer"), ("sglang", "function")])
def test_an_engine_that_dies_and_one_that_is_not_known_are_told(owner: str, words: str) -> None:
    class Dying(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.close_connection = True  # no answer

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Dying)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(hl.errors.OptionError, match=words):
            hl.parity(helpers.llama(layers=1), f"http://127.0.0.1:{server.server_port}", [[2, 3]])
    finally:
        server.shutdown()
        server.server_close()


def test_a_model_with_a_forward_of_another_library_has_a_yardstick() -> None:
    """As accelerate leaves it: a copy would call the forward of the trainer, and its rounding be none."""
    model = helpers.llama(layers=1)
    served = copy.deepcopy(model)
    forward = model.forward
    model.forward = lambda *args, **options: forward(*args, **options)
    found = hl.parity(model, served, helpers.prompts(2), new_tokens=4)
    assert found.ok
    assert found.yardstick > 1e-8


class _GrpoTrainer:
    """What the callback reads of TRL's trainer."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.logged: list[dict[str, float]] = []
        self._buffered_inputs: list[dict[str, torch.Tensor]] | None = None

    def sample(self, model: Any) -> None:
        prompt, answer = torch.randint(3, 100, (4, 5)), torch.randint(3, 100, (4, 6))
        with torch.no_grad():
            logits = model(torch.cat([prompt, answer], 1)).logits[:, 4:-1] / self.temperature
        logprobs = logits.log_softmax(-1).gather(-1, answer[..., None])[..., 0]
        masks = {"prompt_mask": torch.ones_like(prompt), "completion_mask": torch.ones_like(answer)}
        ids = {"prompt_ids": prompt, "completion_ids": answer}
        self._buffered_inputs = [{**ids, **masks, "sampling_per_token_logps": logprobs}]

    def log(self, numbers: dict[str, float]) -> None:
        self.logged.append(numbers)


def test_the_callback_compares_new_samples_before_the_weights_move() -> None:
    model = helpers.llama(layers=1)
    trainer, callback = _GrpoTrainer(0.7), hl.debug.ParityCallback(every=2)
    callback.follow(trainer)
    watch = hl.watch(model, "lm_head", on="forward")
    for step in range(5):
        if step % 2 == 0:
            trainer.sample(model)
        state = transformers.TrainerState(global_step=step, is_world_process_zero=True)
        with in_phase("train"):  # a step is under way, and is counted by others
            callback.on_pre_optimizer_step(None, state, None, model=model)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.1)
    watch.remove(quiet=True)
    assert set(watch.report()["fired"].values()) == {3}  # by the samples alone
    assert len(trainer.logged) == 3
    assert all(0 < numbers["parity/times"] < 1.5 for numbers in trainer.logged)
    assert all(set(numbers) == {"parity/gap", "parity/times", "parity/outside"} for numbers in trainer.logged)


def test_sequences_of_one_token_are_compared() -> None:
    model = helpers.llama(layers=1)
    found = hl.parity(model, copy.deepcopy(model), [[2]], new_tokens=1)
    assert found.ok
    assert found.gap.tokens == 1


def test_text_that_is_cut_differently_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    helpers.llama(layers=1).save_pretrained(tmp_path / "model")
    helpers.words(tmp_path / "model")
    flags = ["--trainer", str(tmp_path / "model"), "--engine", str(tmp_path / "model"), "--prompts"]
    row = {"prompt": "w5 w", "completion": "6", "logprobs": [-1.0]}
    (tmp_path / "cut.jsonl").write_text(json.dumps(row))
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "broken.jsonl").write_text("{")
    said = {"cut.jsonl": "cut into other tokens", "empty.txt": "no sequences", "broken.jsonl": "cannot be read"}
    for file, words in said.items():
        assert main(["parity", *flags, str(tmp_path / file)]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = helpers.llama(layers=2)
    model.save_pretrained(tmp_path / "model")
    helpers.words(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("w5 w6 w7\nw8 w9 w10 w11\n")
    flags = ["--trainer", str(tmp_path / "model"), "--engine", str(tmp_path / "model"), "--new-tokens", "6"]
    flags += ["--prompts", str(tmp_path / "prompts.txt"), "--html", str(tmp_path / "page.html")]
    assert main(["parity", *flags, "--json", "--save-healthy", str(tmp_path / "healthy.json")]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ok"]
    assert "yardstick" in shown.err
    page = (tmp_path / "page.html").read_text()
    assert all(words in page for words in ("nothing beyond", "trainer / engine", "█", "model.layers.1", "⟦w"))
    assert main(["parity", *flags, "--max-outside", "-1"]) == 1
    assert "nothing beyond" in capsys.readouterr().out
    assert main(["parity", *flags, "--healthy", str(tmp_path / "no.json")]) == 2
