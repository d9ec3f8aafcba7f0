"""Evaluate a filter over the tags of a dump, without running code: ``layer_id in (0, 3) and search('mlp', name)``.

`Dumper` makes a `FilterExpression` of its setting ``filter`` and asks it for each dump. The text is parsed by Python
and walked here: names, constants, comparisons, ``and``, ``or``, ``not``, arithmetic, lists, and two functions.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from hookline.errors import OptionError

__all__ = ["FilterExpression"]

_COMPARE: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}
_FUNCTIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "search": lambda pattern, text: re.search(pattern, "" if text is None else str(text)) is not None,
    "match": lambda pattern, text: re.match(pattern, "" if text is None else str(text)) is not None,
}


class FilterExpression:
    """A filter over tags; a name that no tag has is None.

    >>> FilterExpression("layer_id is not None and layer_id % 2 == 0")({"layer_id": 4})
    True
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._body = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise OptionError(f"The filter {text!r} is no expression: {error.msg}.") from error
        self._check(self._body)

    def __call__(self, tags: Mapping[str, Any]) -> bool:
        """Return whether a dump with these tags is wanted."""
        try:
            return bool(self._value(self._body, tags))
        except TypeError as error:  # layer_id > 3, where there is no layer
            raise OptionError(
                f"The filter {self.text!r} cannot be asked of {dict(tags)}: {error}. A tag that is not there is None; "
                "write 'layer_id is not None and …'."
            ) from error

    def _check(self, node: ast.expr) -> None:
        """Raise for anything that is not in the grammar."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                self._check_call(inner)
            elif isinstance(inner, ast.BinOp):
                self._refuse_unless(type(inner.op) in _ARITHMETIC, inner)
            elif isinstance(inner, ast.UnaryOp):
                self._refuse_unless(isinstance(inner.op, ast.Not | ast.USub), inner)
            elif isinstance(inner, ast.expr):
                self._refuse_unless(isinstance(inner, _KNOWN), inner)

    def _check_call(self, node: ast.Call) -> None:
        known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        self._refuse_unless(known and len(node.args) == 2 and not node.keywords, node)

    def _refuse_unless(self, is_known: bool, node: ast.expr) -> None:
        if not is_known:
            raise OptionError(
                f"The filter {self.text!r} has {ast.unparse(node)!r}; it takes names, constants, comparisons, and, or, "
                "not, + - % //, lists, and search(pattern, name), match(pattern, name)."
            )

    def _value(self, node: ast.expr, tags: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return tags.get(node.id)
            case ast.BoolOp(op=ast.And()):
                return all(self._value(value, tags) for value in node.values)
            case ast.BoolOp():
                return any(self._value(value, tags) for value in node.values)
            case ast.UnaryOp(op=ast.Not()):
                return not self._value(node.operand, tags)
            case ast.UnaryOp():
                return -self._value(node.operand, tags)
            case ast.BinOp():
                return _ARITHMETIC[type(node.op)](self._value(node.left, tags), self._value(node.right, tags))
            case ast.Compare():
                return self._compared(node, tags)
            case ast.Call(func=ast.Name(id=name)):
                return _FUNCTIONS[name](*(self._value(argument, tags) for argument in node.args))
            case ast.Tuple() | ast.List() | ast.Set():
                return [self._value(item, tags) for item in node.elts]
        raise AssertionError(node)  # pragma: no cover  (refused by _check)

    def _compared(self, node: ast.Compare, tags: Mapping[str, Any]) -> bool:
        left = self._value(node.left, tags)
        for compare, right_node in zip(node.ops, node.comparators, strict=True):
            right = self._value(right_node, tags)
            if not _COMPARE[type(compare)](left, right):
                return False
            left = right
        return True


_KNOWN: Final = (ast.Constant, ast.Name, ast.BoolOp, ast.Compare, ast.Tuple, ast.List, ast.Set)
