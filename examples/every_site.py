"""Put a hook at every kind of site of a small transformer, and print what fired where, in order.

python examples/every_site.py
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hookline as hl


class Block(nn.Module):
    """Attention over the past, then a small network, each added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(x)


FIRED: list[tuple[str, str, str]] = []


# A hook may declare a keyword-only `site`; it is then told where and when it fires.
def see(module: nn.Module, *handed: object, site: hl.Site) -> None:
    """Write down the kind, the module, and the shapes of what the hook was handed."""
    FIRED.append((str(site.kind), site.name or "(the model)", ", ".join(filter(None, map(shape, handed)))))


def see_function(fn: hl.sites.FunctionSite, *handed: object, site: hl.Site) -> None:
    """The same for a function, which is told apart by the module that calls it."""
    name = fn.name.removeprefix("torch.nn.functional.")
    FIRED.append((f"{site.kind}, function", f"{name} in {fn.module}", shape(handed[-1])))


def see_parameter(parameter: nn.Parameter, *, site: hl.Site) -> None:
    """The same for a parameter that has got its gradient."""
    FIRED.append((str(site.kind), site.name, shape(parameter)))


def see_other(kind: str, name: str) -> Callable[..., None]:
    """The same for what is no part of the model: a tensor, an optimizer."""
    return lambda *handed: FIRED.append((kind, name, shape(handed[0])))


def every(module: nn.Module, args: tuple[Tensor, ...], output: Tensor, *, site: hl.Site) -> None:
    """The same, for the hook that goes on every module of the process."""
    FIRED.append(("forward, everywhere", site.name or "(the model)", ""))


def shape(value: object) -> str:
    """A tensor as its shape, a tuple as its first entry."""
    if isinstance(value, tuple) and value:
        return shape(value[0])
    return "×".join(map(str, value.shape)) if isinstance(value, Tensor) else ""


def timeline(fired: list[tuple[str, str, str]]) -> Table:
    """What fired, in order; neighbours of one kind share a line."""
    table = Table("#", "kind", "site", "handed", title="One training step, one save, one load", expand=True)
    first = 1
    for kind, group in itertools.groupby(fired, key=lambda event: event[0]):
        _, names, shapes = zip(*group, strict=True)
        last = first + len(names) - 1
        where = ", ".join(names) if len(names) < 4 else f"{names[0]} … {names[-1]} ({len(names)})"
        table.add_row(f"{first}" if first == last else f"{first}–{last}", kind, where, shapes[0])
        first = last + 1
    return table


def main() -> None:
    """Attach, train one step, save and load, show, remove."""
    torch.manual_seed(0)
    console = Console(width=100, highlight=False)
    blocks = nn.Sequential(Block(32), Block(32))
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(64, 32), blocks=blocks, head=nn.Linear(32, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(64, (4, 16))

    # Every kind of hook, each with another way to say where it goes. All of them come off as one.
    handles = hl.HandleSet(
        [
            hl.attach(model, "blocks.#", see, on="forward_pre"),  # a glob: # is one number
            hl.attach(model, nn.GELU, see, on="forward", observe=True),  # a type
            hl.attach(model, model.head, see, on="backward_pre"),  # a module of the model
            hl.attach(model, re.compile(r"blocks\.\d"), see, on="backward"),  # a regular expression
            hl.attach(model, lambda name, module: "qkv" in name, see, on="full_backward"),  # a predicate
            hl.attach(model, see, on="state_dict_pre"),  # no target: the model itself
            hl.attach(model, ["embed", "head"], see, on="state_dict_post"),  # a list
            hl.attach(model, "*.mlp.*", see, on="load_state_dict_pre", exclude=nn.GELU),  # * crosses dots
            hl.attach(model, "*.mlp", see, on="load_state_dict_post"),
            hl.attach(model, "head.bias", see_parameter, on="param_grad"),  # a parameter
            hl.attach_everywhere(every),  # every module of the process
            hl.attach_function("*.scaled_dot_product_attention", see_function, within=model),  # a function, by any name
            hl.attach_function("aten.gelu*", see_function, on="forward_pre", within=model),  # an operator
            hl.attach_function(nn.functional.layer_norm, see_function, on="backward", within=model),
            hl.attach_optimizer(optimizer, see_other("step_pre", "SGD"), on="step_pre"),
        ]
    )

    logits = model(tokens)
    handles.add(hl.attach_tensor(logits, see_other("grad", "logits")))  # a tensor, by its gradient
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    model.load_state_dict(model.state_dict())

    console.print(timeline(FIRED))
    console.print("\n[bold]handles.report()[/]  what each hook matched, and how often it fired")
    console.print(*map(str, handles.report()), sep="\n")
    console.print("\n[bold]hl.find(model)[/]  the places a hook can go, and who is there")
    console.print(str(hl.find(model, exclude=["blocks.1", "blocks.1.*"])))  # blocks.1 looks like blocks.0

    handles.remove()
    hl.assert_no_hooks(model, foreign=True)
    before = len(FIRED)
    model(tokens)
    console.print(
        f"\n[green]All {len(handles)} hooks are off[/]: {len(FIRED) - before} fired in one more forward, "
        "and hl.assert_no_hooks(model) agrees."
    )


if __name__ == "__main__":
    main()
