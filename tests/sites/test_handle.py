"""Handles: what is switched on comes off again, at once, however it is asked, and leaves nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import tracemalloc
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
from helpers_waiting import PATIENCE
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

import hookline as hl
from hookline.sites._torch import HOOK_DICTS, parameter_hooks_of
from hookline.sites.kinds import MODULE
from hookline.sites.modules import module_hooks as tables

KINDS = [kind.value for kind in MODULE.args]
RUN_KINDS = ["forward_pre", "forward", "backward_pre", "backward", "full_backward"]
REGISTERING = ["register_module", "register_parameter", "register_buffer"]
GLOBAL_DICTS = [
    torch_module._global_module_registration_hooks,
    torch_module._global_parameter_registration_hooks,
    torch_module._global_buffer_registration_hooks,
]


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))


def ignore(*args: object) -> None:
    """A hook of any kind that does nothing."""


def one_place(kind: str) -> str:
    """A target where a hook of that kind fires once in each `exercise`."""
    return "0.weight" if kind == "param_grad" else "0"


def exercise(model: nn.Module) -> None:
    """Run whatever can fire a hook of any kind, once on each module."""
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    model.load_state_dict(model.state_dict())
    for module in list(model.modules()):
        module.add_module("guest", nn.Identity())
        del module.guest
        module.register_parameter("guest", nn.Parameter(torch.ones(1)))
        del module.guest
        module.register_buffer("guest", torch.ones(1))
        del module.guest


def assert_no_trace(model: nn.Module, *, alone: bool = True) -> None:
    """Every dictionary of torch's is empty, those of the process if the model is alone, and the instances are bare."""
    for module in model.modules():
        for attribute, extras in HOOK_DICTS.items():
            for name in (attribute, *extras):
                assert not getattr(module, name), (name, module)
        assert "_call_impl" not in vars(module)
        assert "forward" not in vars(module)
        assert tables.existing_hooks(module) is None
        assert list(parameter_hooks_of(module)) == []
    assert GLOBAL_DICTS == [{}, {}, {}] or not alone
    hl.assert_no_hooks(model, foreign=True)


hook_modules = torch_module.register_module_module_registration_hook
hook_parameters = torch_module.register_module_parameter_registration_hook
hook_buffers = torch_module.register_module_buffer_registration_hook


class Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: object) -> None:
        self.calls += 1


# -- removing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_hook_never_fires_again_and_leaves_no_trace(kind):
    """remove() empties every dictionary, of every kind."""
    model, counter = make_model(), Counter()
    before = [set(vars(module)) for module in model.modules()]
    handle = hl.attach(model, "*", counter, on=kind)
    exercise(model)
    fired = counter.calls
    assert fired > 0
    handle.remove()
    assert_no_trace(model)
    assert [set(vars(module)) for module in model.modules()] == before
    exercise(model)
    assert counter.calls == fired


@pytest.mark.parametrize("kind", KINDS)
def test_removing_twice_is_harmless(kind):
    """A second remove() does nothing, also to hooks attached in between."""
    model, counter = make_model(), Counter()
    first = hl.attach(model, "*", ignore, on=kind)
    first.remove()
    with hl.attach(model, "*", counter, on=kind):
        first.remove()
        exercise(model)
    assert counter.calls > 0
    assert_no_trace(model)


def test_an_always_call_hook_leaves_no_wrapper():
    """The attribute that wraps the call goes with the last such hook."""
    model = make_model()
    first = hl.attach(model, "0", ignore, always_call=True)
    second = hl.attach(model, "0", ignore, always_call=True)
    first.remove()
    assert "_call_impl" in vars(model[0])
    second.remove()
    assert_no_trace(model)


def test_a_with_block_takes_the_hook_off():
    """Leaving the block removes; the handle is what ``as`` gives."""
    model, counter = make_model(), Counter()
    with hl.attach(model, "0", counter) as handle:
        model(torch.ones(1, 2))
        assert not handle.removed
    assert handle.removed
    assert counter.calls == 1
    assert_no_trace(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_with_block_that_raises_takes_the_hook_off_and_lets_the_error_through(error):
    """The error is neither swallowed nor replaced."""
    model = make_model()
    thrown = error("mine")
    with pytest.raises(error) as caught, hl.attach(model, "*", ignore):
        raise thrown
    assert caught.value is thrown
    assert_no_trace(model)


def test_leaving_twice_is_harmless():
    """A handle may be removed inside its own block."""
    model = make_model()
    with hl.attach(model, "0", ignore) as handle:
        handle.remove()
    assert_no_trace(model)


def test_letting_go_of_the_handle_keeps_the_hook():
    """Like torch: an attachment lives with the model, not with the handle."""
    model, counter = make_model(), Counter()
    hl.attach(model, "0", counter)
    gc.collect()
    model(torch.ones(1, 2))
    assert counter.calls == 1
    (handle,) = hl.attached(model)
    handle.remove()
    assert_no_trace(model)


def test_a_handle_found_by_attached_is_equal_to_the_one_given():
    """Two handles on one attachment are the same handle."""
    model = make_model()
    handle = hl.attach(model, "0", ignore)
    (found,) = hl.attached(model)
    assert found == handle
    assert hash(found) == hash(handle)
    assert handle != hl.attach(model, "0", ignore)
    for each in hl.attached(model):
        each.remove()
    assert handle.removed
    assert_no_trace(model)


def test_only_the_removed_hook_goes():
    """Counts after removing the second and then the first of three: (1,1,1), (2,1,2), (2,1,3)."""
    model, counters = make_model(), [Counter(), Counter(), Counter()]
    handles = [hl.attach(model, "0", counter, on="forward_pre") for counter in counters]
    model(torch.ones(1, 2))
    assert [c.calls for c in counters] == [1, 1, 1]
    handles[1].remove()
    model(torch.ones(1, 2))
    assert [c.calls for c in counters] == [2, 1, 2]
    handles[0].remove()
    model(torch.ones(1, 2))
    assert [c.calls for c in counters] == [2, 1, 3]
    handles[2].remove()
    assert_no_trace(model)


def test_foreign_hooks_stay_when_ours_go():
    """Removal touches only our own, in every dictionary."""
    model = make_model()
    foreign = [
        model[0].register_forward_hook(ignore),
        model[0].register_forward_pre_hook(ignore),
        model[0].register_full_backward_hook(ignore),
        model[0].register_state_dict_pre_hook(ignore),
        model[0].register_state_dict_post_hook(ignore),
        model[0].register_load_state_dict_pre_hook(ignore),
        model[0].register_load_state_dict_post_hook(ignore),
        model[0].weight.register_post_accumulate_grad_hook(ignore),
        *(register(ignore) for register in (hook_modules, hook_parameters, hook_buffers)),
    ]
    for kind in KINDS:
        hl.attach(model, "0", ignore, on=kind).remove()
    for handle in foreign:
        assert list(handle.hooks_dict_ref()) == [handle.id]
        handle.remove()
    assert model[0]._is_full_backward_hook is True


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
@pytest.mark.parametrize("observe", [True, False])
def test_removal_between_forward_and_backward_is_immediate(kind, observe):
    """A gradient hook taken off after the forward does not fire in the backward."""
    model, counter = make_model(), Counter()
    handle = hl.attach(model, "*", counter, on=kind, observe=observe)
    output = model(torch.ones(1, 2, requires_grad=True))
    handle.remove()
    output.sum().backward()
    assert counter.calls == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_remove_itself_while_firing(kind):
    """It fires once per module at most, the other hooks are not skipped, and nothing raises."""
    model, before, after = make_model(), Counter(), Counter()
    fired = []

    def leave(*args: object) -> None:
        fired.append(1)
        handle.remove()

    first, handle, last = (hl.attach(model, one_place(kind), hook, on=kind) for hook in (before, leave, after))
    exercise(model)
    exercise(model)
    assert len(fired) == 1
    assert before.calls == 2
    assert after.calls == 2
    first.remove()
    last.remove()
    assert_no_trace(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_hook_may_remove_itself_beside_foreign_hooks(kind):
    """Torch walks some of its dictionaries live; our going must not disturb it."""
    model, foreign = make_model(), Counter()
    register = {
        "forward_pre": model[0].register_forward_pre_hook,
        "forward": model[0].register_forward_hook,
        "backward_pre": model[0].register_full_backward_pre_hook,
        "backward": model[0].register_full_backward_hook,
        "full_backward": model[0].register_full_backward_hook,
        "state_dict_pre": model[0].register_state_dict_pre_hook,
        "state_dict_post": model[0].register_state_dict_post_hook,
        "load_state_dict_pre": model[0].register_load_state_dict_pre_hook,
        "load_state_dict_post": model[0].register_load_state_dict_post_hook,
        "param_grad": model[0].weight.register_post_accumulate_grad_hook,
        "register_module": hook_modules,
        "register_parameter": hook_parameters,
        "register_buffer": hook_buffers,
    }[kind]
    handle = hl.attach(model, "0", lambda *args: handle.remove(), on=kind)
    theirs = register(foreign)
    exercise(model)
    exercise(model)
    assert foreign.calls == 2 * (len(list(model.modules())) if kind in REGISTERING else 1)  # those are of the process
    theirs.remove()
    hl.assert_no_hooks(model)
    assert_no_trace(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_attach_another_while_firing(kind):
    """The new hook is on from the next call; the current one is not disturbed."""
    model, late = make_model(), Counter()
    handles = []

    def invite(*args: object) -> None:
        if not handles:
            handles.append(hl.attach(model, one_place(kind), late, on=kind))

    handle = hl.attach(model, one_place(kind), invite, on=kind)
    exercise(model)
    assert late.calls == 0
    exercise(model)
    assert late.calls == 1
    handle.remove()
    handles[0].remove()
    assert_no_trace(model)


def test_a_hook_may_remove_all_others_while_firing():
    """Whatever the current call does with them, none fires in the next one."""
    model, others = make_model(), [Counter() for _ in range(4)]
    handles = []

    def clear(*args: object) -> None:
        for handle in handles:
            handle.remove()

    handles += [hl.attach(model, "*", other, on=kind) for other, kind in zip(others, RUN_KINDS, strict=False)]
    mine = hl.attach(model, "1", clear, on="forward_pre", prepend=True)
    exercise(model)
    after_first = [other.calls for other in others]
    exercise(model)
    assert [other.calls for other in others] == after_first
    mine.remove()
    assert_no_trace(model)


# -- from another thread -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUN_KINDS)
@pytest.mark.parametrize("observe", [False, True])
def test_hooks_come_and_go_in_another_thread_while_the_model_runs(kind, observe):
    """A model in a training loop never notices, whenever a hook is attached or removed beside it."""
    model = make_model()
    errors: list[BaseException] = []
    stop = threading.Event()

    def train() -> None:
        try:
            while not stop.is_set():
                model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hl.errors.HookNeverFired)
            for _ in range(150):
                hl.attach(model, "*", ignore, on=kind, observe=observe).remove()
                if errors:
                    break
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert_no_trace(model)


def test_a_handle_may_be_removed_in_another_thread():
    """The hook is off in every thread once remove() has returned."""
    model, counter = make_model(), Counter()
    handle = hl.attach(model, "0", counter)
    thread = threading.Thread(target=handle.remove)
    thread.start()
    thread.join()
    model(torch.ones(1, 2))
    assert counter.calls == 0
    assert_no_trace(model)


def test_two_threads_may_remove_the_same_handle_at_once():
    """Both come back, the hook is off, nothing raises."""
    errors = []
    for _ in range(50):
        model = make_model()
        handle = hl.attach(model, "*", ignore, on="backward")

        def remove(handle: hl.HookHandle = handle) -> None:
            try:
                handle.remove()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=remove) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_no_trace(model)
    assert errors == []


# -- weak to the model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REGISTERING)
def test_a_model_that_goes_with_its_hooks_on_leaves_nothing_in_the_process(kind):
    """torch's dictionaries of registration hooks, which know no module, are empty at the next registration."""
    model = make_model()
    hl.attach(model, "*", ignore, on=kind)
    exercise(model)
    assert sorted(map(len, GLOBAL_DICTS)) == [0, 0, 1]
    del model
    gc.collect()
    exercise(make_model())
    assert GLOBAL_DICTS == [{}, {}, {}]


@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_keeps_neither_the_model_nor_its_modules_alive(kind):
    """With only the handle left, the model goes, and the handle can still report and be removed."""
    model = make_model()
    handle = hl.attach(model, "*", ignore, on=kind)
    exercise(model)
    references = [weakref.ref(item) for item in (*model.modules(), *model.parameters())]
    matched = len(list(model.parameters() if kind == "param_grad" else model.modules()))
    del model
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert handle.report().matched == matched
    assert handle.report().attached == 0
    handle.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_whose_hook_refers_to_it_still_goes(kind):
    """A method of the model as its own hook is a ring that the collector can see; torch's param_grad is not."""

    class SelfHooked(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(2, 2))
            self.handle = hl.attach(self, "*", self.note, on=kind)

        def note(self, *args: object) -> None:
            """A hook of any kind."""

    model = SelfHooked()
    exercise(model)
    assert model.handle.report().fired > 0
    references = [weakref.ref(item) for item in (*model.modules(), *model.parameters())]
    del model
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_a_model_goes_after_a_forward_that_raised():
    """A call that was cut short holds on to nothing."""
    model = nn.Sequential(nn.Linear(2, 2))
    handles = [hl.attach(model, "*", ignore, on=kind) for kind in RUN_KINDS]
    handles.append(hl.attach(model, "*", ignore, always_call=True))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3, requires_grad=True))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    for handle in handles:
        handle.remove()


def test_activations_go_when_the_graph_goes():
    """Gradient hooks keep no tensor beyond the backward that made it."""
    model = make_model()
    with hl.attach(model, "*", ignore, on="backward"), hl.attach(model, "*", ignore, on="backward_pre"):
        x = torch.ones(1, 2, requires_grad=True) * 2
        references = [weakref.ref(x)]
        output = model(x)
        references.append(weakref.ref(output))
        output.sum().backward()
        del output, x
        gc.collect()
        assert [reference() for reference in references] == [None, None]


def test_a_graph_that_is_dropped_without_a_backward_goes():
    """An output nobody differentiates frees its graph at once, without the collector."""
    model = make_model()
    with hl.attach(model, "*", ignore, on="backward"):
        gc.collect()
        gc.disable()
        try:
            inner = torch.ones(1, 2, requires_grad=True) * 2
            reference = weakref.ref(inner)
            output = model(inner)
            del inner, output
            assert reference() is None
        finally:
            gc.enable()
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_cycles_leave_nothing_behind(kind):
    """No object, no table and no dictionary entry is left after attaching and removing a thousand times."""
    model = make_model()

    def cycle(times: int) -> int:
        for _ in range(times):
            hl.attach(model, "*", ignore, on=kind).remove()
        gc.collect()
        return len(gc.get_objects())

    before = cycle(10)
    assert cycle(1000) - before < 20
    # Only this model's entries: dead ones that other tests left are swept whenever the table next grows.
    assert not {id(module) for module in model.modules()} & set(tables._HOOKED)
    assert not tables.LEFT_BEHIND
    assert_no_trace(model)


def test_three_hundred_training_steps_with_hooks_leave_nothing_behind():
    """Memory of a hooked training loop does not grow."""
    model = make_model()
    handles = [hl.attach(model, "*", ignore, on=kind) for kind in RUN_KINDS if kind != "full_backward"]

    def steps(count: int) -> int:
        for _ in range(count):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        steps(20)
        before = steps(20)
        assert steps(300) - before < 300 * 300  # bytes; one kept call would be more than that each step
    finally:
        tracemalloc.stop()
    for handle in handles:
        handle.remove()


# -- sets ----------------------------------------------------------------------------------------------------


class Recorder(RemovableHandle):
    """A handle that notes its removal and may fail at it."""

    def __init__(self, name: str, log: list[str], error: BaseException | None = None) -> None:
        super().__init__(OrderedDict())
        self.name, self.log, self.error = name, log, error

    def remove(self) -> None:
        self.log.append(self.name)
        if self.error is not None:
            raise self.error


def test_both_handles_are_removable_handles_of_torch():
    """Code written against torch's class takes ours."""
    model = make_model()
    with hl.attach(model, "0", ignore) as handle, hl.HandleSet([handle]) as handles:
        assert isinstance(handle, RemovableHandle)
        assert isinstance(handles, RemovableHandle)


def test_a_set_removes_the_last_first():
    """Removal runs backwards through the handles."""
    log: list[str] = []
    handles = hl.HandleSet([Recorder("a", log), Recorder("b", log)])
    handles.add(Recorder("c", log))
    assert len(handles) == 3
    assert [handle.name for handle in handles] == ["a", "b", "c"]
    assert handles[0].name == "a"
    handles.remove()
    assert log == ["c", "b", "a"]


def test_a_failing_member_does_not_keep_the_others_on():
    """Every handle is removed, then the first error is raised."""
    model, log = make_model(), []
    first, second = ValueError("first"), ValueError("second")
    handles = hl.HandleSet(
        [
            hl.attach(model, "0", ignore),
            Recorder("a", log, second),
            Recorder("b", log, first),
            hl.attach(model, "1", ignore),
        ]
    )
    with pytest.raises(ValueError, match="first"):
        handles.remove()
    assert log == ["b", "a"]
    assert_no_trace(model)


def test_an_interrupt_while_removing_does_not_keep_the_others_on():
    """Also Ctrl-C in the middle of a removal lets the rest come off."""
    model = make_model()
    handles = hl.HandleSet([hl.attach(model, "0", ignore), Recorder("a", [], KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt):
        handles.remove()
    assert_no_trace(model)


def test_a_set_may_be_removed_twice_and_used_in_a_block():
    """Leaving the block after a removal is harmless; reports come from our own handles."""
    model, foreign = make_model(), make_model()
    with hl.HandleSet([hl.attach(model, "*", ignore), foreign.register_forward_hook(ignore)]) as handles:
        model(torch.ones(1, 2))
        assert [receipt.fired for receipt in handles.report()] == [5]
        handles.remove()
    assert_no_trace(model)
    assert_no_trace(foreign)
    assert repr(handles) == "<HandleSet of 2; off>"


def test_a_warning_turned_error_still_takes_everything_off():
    """With warnings as errors, a silent hook complains after it is off, and the others come off too."""
    model = make_model()
    silent = nn.Linear(2, 2)
    model.add_module("unused", nn.ModuleDict({"inner": silent}))
    model.forward = lambda x: model[0](x)
    handles = hl.HandleSet([hl.attach(model, "0", ignore), hl.attach(model, "unused.inner", ignore)])
    model(torch.ones(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(hl.errors.HookNeverFired):
            handles.remove()
    del model.forward
    assert_no_trace(model)


def test_the_repr_is_one_short_line():
    """A handle says what it is, where it is and what it did."""
    model = make_model()
    handle = hl.attach(model, "0", ignore)
    assert repr(handle) == "<HookHandle ignore forward on '0', fired 0; on, .remove() takes it off>"
    model(torch.ones(1, 2))
    handle.remove()
    assert repr(handle) == "<HookHandle ignore forward on '0', fired 1; off>"
    with hl.attach(model, "*", ignore, on="backward", name="watcher") as many:
        assert repr(many) == "<HookHandle watcher backward on 5 modules, fired 0; on, .remove() takes it off>"
        assert many.names == ("", "0", "1", "2", "2.0")
        assert many.name == "watcher"


# -- copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))])
def test_a_copied_handle_is_one_that_is_off(duplicate):
    """Removing a copy does not touch the original's hook."""
    model, counter = make_model(), Counter()
    handle = hl.attach(model, "0", counter, name="mine")
    other = duplicate(handle)
    assert other.removed
    assert other.name == "mine"
    other.remove()
    model(torch.ones(1, 2))
    assert counter.calls == 1
    assert repr(other).endswith("; off>")
    handle.remove()


def roundtrip_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def roundtrip_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip_pickle, roundtrip_torch])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_model_carries_no_hook_of_ours(kind, duplicate):
    """The copy fires nothing, works, and becomes clean; the original's hook stays and comes off by its handle."""
    model = make_model()
    # A hook that cannot be pickled must not matter.
    handle = hl.attach(model, "*", lambda *args: None, on=kind)
    twin = duplicate(model)
    exercise(twin)
    assert handle.report().fired == 0
    assert hl.attached(twin) == []
    hl.assert_no_hooks(twin, foreign=True)
    assert_no_trace(twin, alone=False)
    exercise(model)
    assert handle.report().fired > 0
    handle.remove()
    assert_no_trace(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip_pickle, roundtrip_torch])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_model_is_clean_at_its_first_use_without_being_asked(kind, duplicate):
    """What the copy has kept goes at its first forward, or does nothing, and its own hooks attach as ever."""
    model, counter = make_model(), Counter()
    with hl.attach(model, "*", ignore, on=kind):
        twin = duplicate(model)
        exercise(twin)
        exercise(twin)
        with hl.attach(twin, one_place(kind), counter, on=kind):
            exercise(twin)
    assert counter.calls == 1
    if kind not in RUN_KINDS:
        hl.assert_no_hooks(twin, foreign=True)
    assert_no_trace(twin)


@pytest.mark.parametrize("kind", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_a_copied_model_with_a_foreign_state_hook_after_ours_saves_and_loads(kind):
    """What is left of our hook does not disturb torch's walk over the others."""
    model, foreign = make_model(), Counter()
    handle = hl.attach(model, "0", ignore, on=kind)
    register = kind if kind.endswith("pre") else kind.replace("_post", "_post")
    getattr(model[0], f"register_{register}_hook")(foreign)
    twin = copy.deepcopy(model)
    copied = next(
        reversed(
            getattr(
                twin[0], f"_{kind.removesuffix('_post')}_hooks" if kind == "state_dict_post" else f"_{kind}_hooks"
            ).values()
        )
    )
    exercise(twin)
    exercise(twin)
    counted = getattr(copied, "hook", copied)
    assert counted.calls == 2
    handle.remove()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip_pickle, roundtrip_torch])
def test_a_copied_model_with_an_always_call_hook_calls_itself(duplicate):
    """The wrapper around the call does not travel: the copy runs its own weights."""
    model = make_model()
    with hl.attach(model, "*", lambda *args: None, always_call=True) as handle:
        twin = duplicate(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(twin(torch.ones(1, 2)), torch.zeros(1, 2))
        assert handle.report().fired == 0
        assert_no_trace(twin)
        model(torch.ones(1, 2))


def test_a_shallow_copy_with_an_always_call_hook_calls_itself():
    """``copy.copy`` shares torch's dictionaries, but a call of the copy must run the copy."""
    model = nn.Linear(2, 2, bias=False)
    with hl.attach(model, ignore, always_call=True):
        twin = copy.copy(model)
        twin._parameters = dict(model._parameters)
        twin.weight = nn.Parameter(torch.zeros(2, 2))
        assert torch.equal(twin(torch.ones(1, 2)), torch.zeros(1, 2))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip_pickle, roundtrip_torch])
def test_a_model_that_keeps_its_handles_can_be_copied_and_saved(duplicate):
    """Handles stored on the model travel as handles that are off."""
    model = make_model()
    model.handle = hl.attach(model, "0", lambda *args: None)
    model.handles = hl.HandleSet([hl.attach(model, "1", lambda *args: None, on="backward")])
    twin = duplicate(model)
    assert twin.handle.removed
    assert all(handle.removed for handle in twin.handles)
    exercise(twin)
    twin.handle.remove()
    twin.handles.remove()
    assert not model.handle.removed
    exercise(model)
    assert model.handle.report().fired == 1
    model.handle.remove()
    model.handles.remove()
    assert_no_trace(model)


@pytest.mark.parametrize("kind", KINDS)
def test_saving_the_weights_is_the_same_with_hooks(kind):
    """A state dict has the same keys and values while hooks are attached."""
    model = make_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with hl.attach(model, "*", ignore, on=kind):
        after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_process_that_ends_with_hooks_on_says_nothing():
    """The tables of modules that die with the interpreter go without a word."""
    code = (
        "import torch, hookline as hl\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
        "def hook(*args): pass\n"
        "handles = [hl.attach(model, '*', hook, on=kind) for kind in ('forward', 'forward_pre', 'backward')]\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
