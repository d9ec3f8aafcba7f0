"""SGLang: its every-leaf dump and its layer-tagged dump, with what its code gets wrong put right."""

from __future__ import annotations

import pytest
import torch
from helpers_training import differences, plain_step, train
from torch import nn

import hookline as hl
from hookline.sglang import Dumper, DumperConfig, register_forward_hook_for_model


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.fail = False

    def forward(self, x, scale=None):
        out = self.act(self.proj(x))
        if self.fail:
            raise RuntimeError("planted")
        return out.mul_(2.0)  # in place, on what `act` gave out


class Top(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, input_ids, forward_batch=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, scale=torch.ones(1))
        return x


class LM(nn.Module):
    """The shape of a language model: ``model`` and ``lm_head``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = Top()
        self.lm_head = nn.Linear(4, 7)

    def forward(self, input_ids, forward_batch=None):
        return self.lm_head(self.model(input_ids, forward_batch))


def load(dumper, number):
    return torch.load(dumper.folder / f"Pass{number:05d}.pt", weights_only=True)


def tokens(start):
    return torch.tensor([start, start + 1])


LEAVES = [
    "model.embed",
    *(f"model.layers.{i}.{part}" for i in range(3) for part in ("proj", "act")),
    "model",
    "lm_head",
]


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")  # of the capture, on the model itself
@pytest.mark.parametrize("directly", [False, True], ids=["called", "forward() called"])
def test_file_n_has_all_of_pass_n_the_top_module_and_the_head_included(directly, tmp_path):
    """Run twice; a later in-place edit of an activation does not show."""
    model = LM()
    call = model.forward if directly else model
    with hl.capture(model, "*", clone=True) as cache, register_forward_hook_for_model(model, tmp_path) as dumper:
        logits = [call(tokens(start)) for start in (0, 3)]
    assert dumper.passes == 2
    assert sorted(path.name for path in dumper.folder.iterdir()) == ["Pass00000.pt", "Pass00001.pt"]
    for number in range(2):
        dumped = load(dumper, number)
        assert list(dumped) == LEAVES
        assert torch.equal(dumped["lm_head"], logits[number])
        for name in LEAVES:
            assert torch.equal(dumped[name], cache[name].calls[number].output), name
        # `act` was multiplied by 2 in place afterwards:
        assert torch.equal(dumped["model.layers.2.act"] * 2, dumped["model"])
    hl.assert_no_hooks(model, foreign=True)


def test_layers_are_chosen_with_all_that_is_below_them(tmp_path, monkeypatch):
    """Modules outside of layers are always there; the environment names the top module and the layers."""
    model = LM()
    with register_forward_hook_for_model(model, tmp_path, [1], 4, 2, 3) as dumper:
        model(tokens(0))
    assert list(load(dumper, 0)) == ["model.embed", "model.layers.1.proj", "model.layers.1.act", "model", "lm_head"]
    assert dumper.folder.name.startswith("TP2_PP3_Rank14_pid")
    with pytest.raises(ValueError, match=r"the layers under 'model\.layers\.' are: 0 to 2"):
        register_forward_hook_for_model(model, tmp_path, [9])
    monkeypatch.setenv("TENSOR_DUMP_TOP_LEVEL_MODULE_NAME", "decoder")
    with pytest.raises(hl.errors.NoMatchError, match="model should have a module named decoder"):
        register_forward_hook_for_model(model, tmp_path)
    hl.assert_no_hooks(model, foreign=True)
    renamed = nn.Module()
    renamed.decoder = nn.Module()
    renamed.decoder.blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    renamed.decoder.forward = lambda x: renamed.decoder.blocks[1](renamed.decoder.blocks[0](x))
    monkeypatch.setenv("TENSOR_DUMP_LAYERS_MODULE_NAME", "blocks")
    with register_forward_hook_for_model(renamed, tmp_path, 1) as dumper:
        renamed.decoder(torch.ones(1, 1))
    assert list(load(dumper, 0)) == ["decoder.blocks.1", "decoder"]


def test_the_types_of_a_server_are_dumped_by_their_rules(tmp_path, caplog):
    """Tuples without None, logits, batches, pipeline tensors, dictionaries; what cannot be dumped is said."""

    class Gives(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, *args):
            return self.value

    class Holder:
        def __init__(self, **values):
            vars(self).update(values)

    one, two = torch.ones(1), torch.full((1,), 2.0)
    values = {
        "single": (None, one),
        "pair": [one, two],
        "logits": Holder(next_token_logits=one),
        "proxy": Holder(tensors={"hidden": two}),
        "nested": {"a": (one, {"b": two})},
        "odd": object(),
        "mixed": (one, "text"),
    }
    model = nn.Module()
    model.model = nn.Module()
    for name, value in values.items():
        setattr(model.model, name, Gives(value))
    model.model.forward = lambda batch: [child(one) for child in model.model.children()] and one
    batch = Holder(input_ids=one, seq_lens=two, positions=one)
    with register_forward_hook_for_model(model, tmp_path) as dumper:
        model.model(batch)
    dumped = load(dumper, 0)
    assert sorted(dumped) == [
        "model",
        *(f"model.forward_batch_info.{field}" for field in ("input_ids", "positions", "seq_lens")),
        *("model.logits", "model.mixed.0", "model.nested.a.0", "model.nested.a.1.b", "model.pair"),
        *("model.proxy.pp_proxy_tensors.hidden", "model.single"),
    ]
    assert dumped["model.single"].tolist() == [1]
    assert [tensor.tolist() for tensor in dumped["model.pair"]] == [[1], [2]]
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "Unsupported type: object of model.odd"
    ]


def test_a_pass_that_fails_is_written_as_far_as_it_came(tmp_path):
    """The next one has its own number, and nothing of the failed one."""
    model = LM()
    with register_forward_hook_for_model(model, tmp_path) as dumper:
        model.model.layers[1].fail = True
        with pytest.raises(RuntimeError, match="planted"):
            model(tokens(0))
        model.model.layers[1].fail = False
        logits = model(tokens(2))
    assert list(load(dumper, 0)) == LEAVES[:5]
    assert list(load(dumper, 1)) == LEAVES
    assert torch.equal(load(dumper, 1)["lm_head"], logits)


def test_a_shared_module_is_dumped_at_each_call(tmp_path):
    """The second call of a pass has #1 behind its name."""
    model = LM()
    model.model.layers[2] = model.model.layers[0]
    with register_forward_hook_for_model(model, tmp_path) as dumper:
        model(tokens(0))
    dumped = load(dumper, 0)
    assert {"model.layers.0.proj", "model.layers.0.proj#1"} <= set(dumped)


def all_modules(tmp_path, **settings):
    return Dumper(DumperConfig(enable=True, dir=str(tmp_path), non_intrusive_mode="all", **settings))


def test_inputs_children_and_output_of_a_layer_have_its_id(tmp_path):
    """The layer's own output too, and dumps from inside of its code."""
    model, dumper = LM(), all_modules(tmp_path)
    inner = model.model.layers[1]
    inner.proj.register_forward_hook(lambda module, args, output: dumper.dump("mine", output))
    with dumper.capture_output() as found, dumper.register_non_intrusive_dumper(model):
        model(tokens(0))
    ids = {name: entry["meta"].get("layer_id") for name, entry in found.items()}
    for part in ("inputs.0", "inputs.scale", "proj.inputs.0", "proj.output", "act.output", "output"):
        for layer in range(3):
            assert ids[f"non_intrusive__model.layers.{layer}.{part}"] == layer
    assert ids["mine"] == 1
    assert ids["non_intrusive__lm_head.output"] is None
    assert ids["non_intrusive__output"] is None
    assert ids["non_intrusive__model.embed.output"] is None


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")  # its forward did not end
def test_a_layer_that_raises_leaves_no_tag_behind(tmp_path):
    """Dumps after it, in and out of the model, have none."""
    model, dumper = LM(), all_modules(tmp_path)
    with dumper.register_non_intrusive_dumper(model):
        model.model.layers[2].fail = True
        with pytest.raises(RuntimeError, match="planted"):
            model(tokens(0))
        with dumper.capture_output() as found:
            dumper.dump("after", torch.ones(1))
            model.lm_head(torch.ones(1, 4))
    assert sorted(found) == ["after", "non_intrusive__lm_head.inputs.0", "non_intrusive__lm_head.output"]
    assert not any("layer_id" in entry["meta"] for entry in found.values())


def test_dumped_runs_keep_every_bit(tmp_path):
    """Both dumps; negative control: a dump that draws a random number."""
    plain = train(plain_step)

    def dumping(model, x, target):
        dumper = all_modules(tmp_path, enable_grad=True, enable_output_console=False)
        with dumper.capture_output() as found, dumper.register_non_intrusive_dumper(model):
            plain_step(model, x, target)
        assert len(found) > 15

    def every_leaf(model, x, target):
        whole = nn.Sequential()
        whole.add_module("model", model)
        with register_forward_hook_for_model(whole, tmp_path) as dumper:
            plain_step(whole, x, target)
        assert dumper.passes == 1

    def drawing(model, x, target):
        dumper = all_modules(tmp_path, enable_output_file=False)
        with dumper.register_non_intrusive_dumper(model):
            dumper.dump("noise", lambda: torch.rand(1))
            plain_step(model, x, target)

    assert differences(plain, train(dumping)) == []
    assert differences(plain, train(every_leaf)) == []
    assert differences(plain, train(drawing))
