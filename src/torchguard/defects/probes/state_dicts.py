"""Loads that succeed and leave another model than the one that was saved."""

from __future__ import annotations

import torch
from torch import nn

from torchguard.defects.probes import issues, memory_defect


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.output = nn.Linear(2, 3, bias=False)
        self.output.weight = self.embedding.weight


@memory_defect(
    "load_state_dict(assign=True) and to_empty() make two parameters of a tied one",
    title="load_state_dict(assign=True) unties weights",
    guards=("load",),
    advice="After load_state_dict(assign=True) or to_empty(), tie the weights again: "
    "model.output.weight = model.embedding.weight.",
    limits="Module by module, as to_empty(recurse=False) is called, a tie can't be seen.",
)
def tied_assign() -> str | None:
    """Load by assignment, and empty a model of the meta device.

    Both go from name to name and make a parameter for each, so an embedding and an output layer
    that shared one weight have two, which drift apart from the first step on.
    https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py
    """
    weight = torch.ones(3, 2)
    assigned = _Tied()
    assigned.load_state_dict(
        {"embedding.weight": weight, "output.weight": weight.clone()}, assign=True
    )
    with torch.device("meta"):
        emptied = _Tied()
    emptied.to_empty(device="cpu")
    models = {"load_state_dict(assign=True)": assigned, "to_empty()": emptied}
    untied = [
        name for name, model in models.items() if model.output.weight is not model.embedding.weight
    ]
    return f"a tied weight is two parameters after {' and '.join(untied)}" if untied else None


@memory_defect(
    "load_state_dict(assign=True) marks the state: its next load replaces parameters too",
    title="a load after assign=True replaces weights too",
    upstream=issues(188166),
    guards=("load",),
    advice="Load a new dict each time, model.load_state_dict(dict(state)): it has no _metadata.",
)
def load_assign_marks() -> str | None:
    """Load a state by assignment, then the same state into a model that an optimizer trains.

    The mark is in the state's ``_metadata``, so a copy and a file of it have it as well.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py#L2587
    """
    state = nn.Linear(2, 1).state_dict()
    nn.Linear(2, 1).load_state_dict(state, assign=True)
    student = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    student.load_state_dict(state)
    trained = optimizer.param_groups[0]["params"][0]
    return None if trained is student.weight else "the optimizer trains parameters of no model"


@memory_defect(
    "Optimizer.load_state_dict casts float32 moments of bfloat16 parameters to bfloat16",
    title="resume rounds float32 moments to bfloat16",
    guards=("load",),
    advice="After load_state_dict, copy the saved tensors into optimizer.state[parameter] again.",
    limits="Adam and others that PyTorch can't step with such moments: cast, with a warning.",
)
def optimizer_state_dtype() -> str | None:
    """Load a momentum that was kept in float32; SGD and optimizers of other packages use it so.

    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py#L801
    """
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    saved, loaded = (torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for _ in range(2))
    momentum = torch.full((2,), 1 / 3)
    saved.state[parameter]["momentum_buffer"] = momentum
    loaded.load_state_dict(saved.state_dict())
    found = loaded.state[parameter]["momentum_buffer"]
    if torch.equal(found, momentum):
        return None
    return f"a float32 moment of {momentum[0]:.6f} is {found[0].item():.6f} in bfloat16"


@memory_defect(
    "Optimizer.load_state_dict goes by position though both sides have names: other moments",
    title="resume gives parameters each other's moments",
    guards=("load",),
    advice="Make the optimizer from the parameters in the order in which they were when saved.",
)
def optimizer_order() -> str | None:
    """Save an optimizer of three named parameters, load it into one of another order."""
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in "abc"}
    saved = torch.optim.SGD(list(parameters.items()), lr=0.1, momentum=0.9)
    if "param_names" not in saved.param_groups[0]:
        return None
    for name, parameter in parameters.items():
        saved.state[parameter]["momentum_buffer"] = torch.full((2,), float("abc".index(name)))
    order = list(reversed(parameters.items()))
    loaded = torch.optim.SGD(order, lr=0.1, momentum=0.9)
    loaded.load_state_dict(saved.state_dict())
    found = loaded.state[parameters["c"]]["momentum_buffer"][0].item()
    return None if found == 2 else f"c got the moments of {'abc'[int(found)]}"  # noqa: PLR2004
