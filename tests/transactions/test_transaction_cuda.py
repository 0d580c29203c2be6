"""transaction() on a GPU. What can be tried on the CPU runs there too: it is known to work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.fault_injection import count, nothing, transaction
from support.gpu import MIB, each_device, little_memory, out_of_memory
from support.small_training import Case

# B batch, F features
B, F = 8, 4


@pytest.mark.cuda
@pytest.mark.parametrize("feature", ["plain", "dropout"])
@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
def test_a_step_whose_operator_fails_is_as_if_it_had_not_begun(
    implementation: str, feature: str
) -> None:
    case = Case("AdamW", implementation, amp=True, feature=feature, device="cuda")
    bare = count(case, nothing, every=4)
    assert bare.wrong + bare.stuck > 0
    found = count(case, transaction, every=4, restores=True)
    assert found.points > 0
    assert (found.wrong, found.stuck, found.not_restored) == (0, 0, 0), found.examples


@each_device
@pytest.mark.filterwarnings("ignore:.*a batch of 8 samples ran out of memory")
def test_a_batch_that_finds_no_memory_is_run_in_parts(device: str) -> None:
    torch.manual_seed(0)
    whole, in_parts = (nn.Linear(F, 1).double().to(device) for _ in range(2))
    in_parts.load_state_dict(whole.state_dict())
    x_bf, y_b = torch.randn(B, F).double().to(device), torch.randn(B).double().to(device)
    nn.functional.mse_loss(whole(x_bf).squeeze(1), y_b).backward()
    step = torchguard.transaction(in_parts, torch.optim.SGD(in_parts.parameters(), lr=1.0))
    expected = [p.detach() - p.grad for p in whole.parameters() if p.grad is not None]
    errors: list[type[BaseException]] = []
    with little_memory(device) as too_many:

        def loss_of(part: Any) -> torch.Tensor:
            x, y = part
            loss = nn.functional.mse_loss(in_parts(x).squeeze(1), y)
            try:  # activations: on the GPU 8 samples need more than is left, and 4 do not
                if device == "cuda":
                    torch.empty(len(x) * 12 * MIB, dtype=torch.uint8, device=device)
                elif len(x) > B // 2:
                    torch.empty(too_many)
            except out_of_memory(device) as error:
                errors.append(type(error))
                raise
            return loss

        step.run(loss_of, (x_bf, y_b), retry="halve")
    assert len(errors) == 1
    torch.testing.assert_close([p.detach() for p in in_parts.parameters()], expected)
