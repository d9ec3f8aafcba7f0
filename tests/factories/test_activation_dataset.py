"""Activation datasets: written by a run over sequences, read as a torch Dataset."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers_factories import PADDED
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hookline as hl
from hookline.errors import HookSignatureError, OptionError
from hookline.factories import ActivationDataset, export, export_activations, read_export, serving, train_probe
from hookline.specs.apply_specs import hooks_of

SEQUENCES = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9], [7, 9], [3, 2, 3, 8]]
TOKENS = sum(map(len, SEQUENCES))
WIDTH = 4


class Reader(nn.Module):
    """A model that counts its forwards, and whose layers look at one token at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.rows = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.rows += len(input_ids)
        x = self.embed(input_ids) * attention_mask[..., None]
        for layer in self.layers:
            x = layer(x)
        return x


def items(folder: Path, module: str = "layers.1") -> dict[tuple[str, int], tuple[int, list[float]]]:
    """Return token and activation by request and position; a token that is there twice fails."""
    found: dict[tuple[str, int], tuple[int, list[float]]] = {}
    dataset = ActivationDataset(folder, module=module)
    for index in range(len(dataset)):
        item = dataset[index]
        key = (item["request"], item["position"])
        assert key not in found
        found[key] = (item["token"], item["activation"].tolist())
    return found


def test_every_token_of_every_sequence_has_its_activation(tmp_path: Path) -> None:
    """Also in batches; the model is left as it was."""
    model = Reader()
    weights = pickle.dumps(model.state_dict())
    assert export_activations(model, "layers.#", SEQUENCES, folder=tmp_path, batch_size=4) == len(SEQUENCES)
    found = items(tmp_path)
    assert len(found) == TOKENS
    for number, ids in enumerate(SEQUENCES):
        with torch.no_grad():
            expected = model(torch.tensor([ids]), torch.ones(1, len(ids)))[0]
        for position, token in enumerate(ids):
            kept, activation = found[f"sequence-{number}", position]
            assert kept == token
            assert torch.allclose(torch.tensor(activation), expected[position], atol=1e-6)
    assert pickle.dumps(model.state_dict()) == weights
    hl.assert_no_hooks(model, foreign=True)


class ByKeyword(nn.Module):
    """A layer that is called by keyword, as attention in transformers is, and changes its input in place."""

    def forward(self, mask: Tensor, *, hidden_states: Tensor) -> Tensor:
        return hidden_states.mul_(2)


class Changing(Reader):
    """A reader whose second layer is given its input by keyword, beside integers by position."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, ByKeyword())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        first = self.layers[0](self.embed(input_ids))
        changed: Tensor = self.layers[1](hidden_states=first, mask=attention_mask)
        return self.layers[2](changed)  # type: ignore[no-any-return]


def test_inputs_are_written_as_they_were_when_the_call_began(tmp_path: Path) -> None:
    """By position and by keyword; under a name of their own, so that outputs of the same modules join them."""
    model = Changing()
    ran = export_activations(model, "layers.#", SEQUENCES, folder=tmp_path, batch_size=4, inputs=True)
    assert ran == len(SEQUENCES)
    with pytest.raises(OptionError, match="from an earlier call"):
        export_activations(model, "layers.2", SEQUENCES, folder=tmp_path, inputs=True)
    assert export_activations(model, "layers.#", SEQUENCES, folder=tmp_path) == len(SEQUENCES)
    given, returned = items(tmp_path, "layers.1/input"), items(tmp_path, "layers.1")
    assert len(given) == TOKENS
    assert given == items(tmp_path, "layers.0")
    assert returned == items(tmp_path, "layers.2/input")
    doubled = {key: (token, [2 * number for number in row]) for key, (token, row) in given.items()}
    assert returned == doubled != given
    with pytest.raises(OptionError, match=r"it has 'layers.0', 'layers.0/input'"):
        ActivationDataset(tmp_path, module="layers.9")
    hl.assert_no_hooks(model, foreign=True)


def test_a_spec_exports_inputs_before_the_forward(tmp_path: Path) -> None:
    """With the requests of a served batch; on="forward", which comes too late, is refused with the reason."""
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    spec = {
        "target_modules": ["1"],
        "hook_factory": "hookline.factories:export",
        "config": {"folder": str(tmp_path), "inputs": True},
        "observe": True,
    }
    with pytest.raises(HookSignatureError, match="cannot be a forward hook"):
        hl.register_hooks(model, [spec])
    numbers = torch.arange(24.0).reshape(2, 3, 4) - 12
    expected = numbers[0].clone()
    with hl.register_hooks(model, [{**spec, "on": "forward_pre"}]) as handles, serving(PADDED):
        [hook] = hooks_of(handles)
        model(numbers)
    hook.close()
    assert torch.equal(ActivationDataset(tmp_path, module="1/input").tensors()[0][:3], expected)
    assert not torch.equal(numbers[0], expected)


def test_what_has_run_until_an_error_is_kept(tmp_path: Path) -> None:
    def sequences() -> Iterator[list[int]]:
        yield from [[1, 2]] * 16
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_activations(Reader(), "layers.1", sequences(), folder=tmp_path, batch_size=1)
    assert len({record.request for record in read_export(tmp_path)}) == 16


def test_a_loader_gives_batches_and_the_dataset_travels_to_workers(tmp_path: Path) -> None:
    """Default collation works; a pickled dataset opens its own files; negative indices count from the end."""
    export_activations(Reader(), "layers.1", SEQUENCES, folder=tmp_path)
    dataset = ActivationDataset(tmp_path)
    batches = list(DataLoader(dataset, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(0)))
    assert sum(len(batch["activation"]) for batch in batches) == len(dataset) == TOKENS
    assert sorted(token for batch in batches for token in batch["token"].tolist()) == sorted(
        token for ids in SEQUENCES for token in ids
    )
    twin = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(twin[-1]["activation"], dataset[TOKENS - 1]["activation"])
    with pytest.raises(IndexError):
        dataset[TOKENS]
    activations, tokens = dataset.tensors()
    assert torch.equal(activations[3], dataset[3]["activation"])
    assert train_probe(activations, tokens == 3, held_out=0.0, weight_decay=1e-4).width == WIDTH


def test_an_export_of_a_served_model_is_read_by_request(tmp_path: Path) -> None:
    """Two requests of a padded batch."""
    hook = export({"folder": str(tmp_path)})
    with serving(PADDED):
        hook(nn.Identity(), (), torch.arange(24.0).reshape(2, 3, 4))
    hook.close()
    dataset = ActivationDataset(tmp_path)
    found = [(item["request"], item["token"], item["position"]) for item in map(dataset.__getitem__, range(4))]
    assert found == [("a", 1, 0), ("a", 2, 1), ("a", 3, 2), ("b", 9, 0)]
    assert dataset[3]["activation"].tolist() == [20.0, 21.0, 22.0, 23.0]


def test_mistakes_of_writers_are_told_before_or_instead_of_a_run(tmp_path: Path) -> None:
    """A sequence without tokens, a size of nothing, a module that is not there."""
    model = Reader()
    with pytest.raises(OptionError, match="sequence 1 is empty"):
        export_activations(model, "layers.1", [[1], []], folder=tmp_path / "other")
    with pytest.raises(OptionError, match="batch_size"):
        export_activations(model, "layers.1", SEQUENCES, folder=tmp_path / "other", batch_size=0)
    with pytest.raises(KeyError, match="nearest"):
        export_activations(model, "layer.1", SEQUENCES, folder=tmp_path / "other")
    hl.assert_no_hooks(model, foreign=True)
