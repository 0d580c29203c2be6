"""The loops of the pages on several ranks and on trainers, each run by two processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from support.child_process import JOIN_RANKS, output_of, run_ranks
from support.document import blocks

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "training"
PAGE = DOCS / "ranks.md"
LOOPS = {
    each.kind: each.code
    for page in (PAGE, DOCS / "lightning.md", DOCS / "accelerate.md")
    for each in blocks(page.read_text("utf-8"))
    if each.language == "py"
}

# DDP may be the last to hold a group: then the group's end waits for its thread with the GIL held,
# and the thread may wait for the GIL. A group that ends in destroy_process_group() waits without.
THREADS = """
import json, os
threads = (open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task"))
print(json.dumps([each for each in threads if "gloo" in each]))
"""

BEGINS = """
from pathlib import Path
import torch.distributed.checkpoint as dcp
import torchguard

root = Path(sys.argv[0]).parent
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
batches = torch.randn(4, 8, 4)
"""

# The launchers of both trainers say in the environment which process this is.
LAUNCHED = (
    JOIN_RANKS.partition("dist.init_process_group")[0]
    + "os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))\n"
)

NEEDS = {
    "fsdp2": JOIN_RANKS,
    "accelerate": LAUNCHED,
    "lightning": LAUNCHED
    + """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

module, loader = Module(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
""",
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_loop_of_the_page_runs(tmp_path: Path, name: str) -> None:
    if name != "fsdp2" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    loop = LOOPS[name]
    if name == "fsdp2":  # that of torch 2.6 does not train on a CPU
        train = "\n".join(f"    {line}" for line in loop.splitlines())
        loop = f"try:\n{train}\nexcept AttributeError as e:\n    assert 'record_event' in str(e)"
    found = run_ranks(f"{NEEDS[name]}{BEGINS}\n{loop}\nprint(); print(json.dumps({{}}))", tmp_path)
    assert found == [{}, {}]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_the_group_of_the_page_ends_in_destroy_process_group() -> None:
    [page] = [each.code for each in blocks(PAGE.read_text("utf-8")) if each.language == "python"]
    assert output_of(page + THREADS) == "4\n[]\n"
