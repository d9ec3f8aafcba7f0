"""Which tensor of an output a tracker looks at."""

from __future__ import annotations

import pytest
import torch

import hookline as hl

X = torch.ones(2, 3)


class LikeATensorDict:
    """Has keys and values, and is no Mapping; raises KeyError for what it does not have."""

    def __init__(self, **values):
        self.values = values

    def keys(self):
        return self.values.keys()

    def __getitem__(self, key):
        if isinstance(key, tuple):
            found = self
            for part in key:
                found = found[part]
            return found
        return self.values[key]


def test_a_tuple_is_the_key_of_a_nested_tensordict():
    """("a", "b") is looked up as one key."""
    assert hl.metta.build_extractor(("a", "b"))(LikeATensorDict(a=LikeATensorDict(b=X))) is X


@pytest.mark.parametrize(
    "output",
    [{"other": X}, {"hidden": "text"}, {"hidden": None}, LikeATensorDict(other=X), (X, X), [X], None, 3, "text"],
    ids=["missing", "text inside", "None inside", "missing in TensorDict", "tuple", "list", "None", "number", "text"],
)
def test_a_key_passes_over_what_it_cannot_find(output):
    """A missing key, a value that is no tensor, an output without keys: None."""
    assert hl.metta.build_extractor("hidden")(output) is None
