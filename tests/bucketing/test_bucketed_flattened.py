"""bucketed(outputs=...): outputs in which a batch and its rows are one dim, of size B * t."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchguard import Buckets, PaddingLeakError, bucketed

# B batch, t length, E experts
LADDER = Buckets([8, 16])


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1) * 2  # (B * t, E)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("check_padding", ["first", "never"])
@pytest.mark.parametrize("length", [5, 8, 9])
def test_rows_of_a_batch(length: int, check_padding: Any, side: Any) -> None:
    wrapped = bucketed(
        flat,
        dims={"x": {1: "t"}},
        buckets=LADDER,
        outputs={0: (None, "t")},
        check_padding=check_padding,
        side=side,
    )
    x = torch.randn(3, length, 2, requires_grad=True)
    found = wrapped(x)
    assert torch.equal(found, flat(x))
    found.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_inside_a_structure_and_with_other_cuts() -> None:
    def model(x: torch.Tensor) -> dict[str, Any]:
        return {"hidden": x + 1, "router_logits": (flat(x), flat(x).T), "each": x.flatten()}

    wrapped = bucketed(
        model,
        dims={"x": {1: "t"}},
        buckets=LADDER,
        outputs={
            "hidden": {1: "t"},
            "router_logits": ({0: (None, "t")}, {-1: (None, "t")}),
            "each": {0: (None, "t", 2)},
        },
    )
    x = torch.randn(3, 5, 2)
    found, expected = wrapped(x), model(x)
    assert torch.equal(found["hidden"], expected["hidden"])
    assert torch.equal(found["each"], expected["each"])
    for one, other in zip(found["router_logits"], expected["router_logits"], strict=True):
        assert torch.equal(one, other)


def test_two_axes_and_a_function_of_one() -> None:
    def pairs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x[:, None] * y[None, ::2]).flatten()

    wrapped = bucketed(
        pairs,
        dims={"x": {0: "s"}, "y": {0: "t"}},
        buckets=LADDER,
        outputs={0: ("s", lambda t: (t + 1) // 2)},
    )
    x, y = torch.randn(5), torch.randn(7)
    assert torch.equal(wrapped(x, y), pairs(x, y))


def test_what_does_not_fit_is_named() -> None:
    x = torch.randn(3, 5, 2)

    def wrap(parts: Any) -> Any:
        return bucketed(flat, dims={"x": {1: "t"}}, buckets=LADDER, outputs={0: parts})

    with pytest.raises(ValueError, match=r"is \(5, 't'\) flattened, for t = 8, but it is 24"):
        wrap((5, "t"))(x)
    with pytest.raises(ValueError, match="expected None for one part only"):
        wrap((None, None, "t"))(x)
    with pytest.raises(TypeError, match=r"outputs has 'u' for output, .* or \(None, 't'\)"):
        wrap((None, "u"))(x)


def test_a_leak_of_flattened_rows_says_what_to_type() -> None:
    wrapped = bucketed(flat, dims={"x": {1: "t"}}, buckets=LADDER)
    with pytest.raises(PaddingLeakError, match=r"output has 3 times 't' in .* {0: \(None, 't'\)}"):
        wrapped(torch.randn(3, 5, 2))
