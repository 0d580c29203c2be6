"""verified and operations that read what they write: what the user is told, and when."""

from __future__ import annotations

import warnings

import pytest
import torch

from torchguard import MiscompilationWarning, OverlapWarning, verified_backend


def shifted(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:] = x[:, :-1]
    return x + 1


def test_a_warning_as_an_error_is_raised_and_no_graph_is_blamed() -> None:
    """Nothing is written, and the check does not take the error for one of eager's."""
    torch._dynamo.reset()
    backend = verified_backend("aot_eager")
    compiled = torch.compile(shifted, backend=backend)
    x = torch.arange(12.0).view(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        warnings.simplefilter("error", MiscompilationWarning)
        with pytest.raises(OverlapWarning, match="clone"):
            compiled(x)
    assert x.equal(torch.arange(12.0).view(3, 4))
    assert [graph.status for graph in backend.stats().graphs] == ["verified"]


def test_the_compiled_result_stays_and_the_line_is_named() -> None:
    """Eager alone is the wrong one: the compiled graph is verified, and the user is told."""
    torch._dynamo.reset()
    backend = verified_backend("aot_eager")
    compiled = torch.compile(shifted, backend=backend)
    x = torch.arange(12.0).view(3, 4)
    expected = x.clone()
    expected[:, 1:] = expected[:, :-1].clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(x)
    assert x.equal(expected)
    (warning,) = [each for each in caught if each.category is OverlapWarning]
    assert warning.filename == __file__
    assert warning.lineno == shifted.__code__.co_firstlineno + 1
    assert [graph.status for graph in backend.stats().graphs] == ["verified"]
