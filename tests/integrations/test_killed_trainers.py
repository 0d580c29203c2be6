"""Kills and Ctrl-C in real trainers, in saves and in micro-batches: the script is started again.

Every run is a fork of one process that has imported the trainer, which takes seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.child_process import output_of
from support.document import blocks

pytestmark = pytest.mark.slow


def block(page: str, kind: str) -> str:
    """Return the block of a page that has this word behind its language."""
    text = (Path(__file__).parents[2] / "docs" / "training" / page).read_text("utf-8")
    return next(each.code for each in blocks(text) if each.kind == kind)


PAGE = {
    "accelerate": block("accelerate.md", "resume"),
    "lightning": block("lightning.md", "random"),
}

BEGIN = """
import contextlib, json, os, shutil, signal, sys, traceback
from pathlib import Path

import torch
from torch import nn
import torchguard

folder, place, page = Path(sys.argv[1]), "", json.loads(sys.argv[2])
calls = {"forward": 0, "interrupted forward": 0, "save": 0}
signal.signal(signal.SIGINT, signal.default_int_handler)

def here(what, at, number=signal.SIGKILL):
    "Send this process a signal at the given call of a place."
    calls[what] += 1
    if place == what and calls[what] == at:
        signal.raise_signal(number)

def killed_in(write, place_of_path):
    "Wrap what writes a file: it writes two bytes of it, then the kill comes."
    def written(*args, **kwargs):
        path = args[place_of_path]
        if place == "save" and isinstance(path, (str, os.PathLike)):
            Path(path).write_bytes(b"PK")
            here("save", 1)
        return write(*args, **kwargs)
    return written

torch.save = killed_in(torch.save, 1)
# Lightning's files are moved to their place: copied, if that is on another file system.
shutil.move = killed_in(shutil.move, 1)

def logged(step, loss):
    with Path(folder, "losses").open("a") as file:
        file.write(json.dumps([step, loss]) + "\\n")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)
        )
    def forward(self, x):
        here("forward", 4 * 4 + 3)  # micro-batch 3 of 4
        here("interrupted forward", 4 + 3, signal.SIGINT)
        return self.layers(x)

rows = torch.randn(128, 4, generator=torch.Generator().manual_seed(1))
"""

TRAINER = """
import transformers
from torchguard.integrations.transformers import RetryTrainer

class WithLoss(Model):
    def forward(self, x, labels=None):
        return {"loss": super().forward(x).square().mean()}

class Losses(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            logged(state.global_step, logs["loss"])

def train(trainer=RetryTrainer):
    args = transformers.TrainingArguments(
        str(folder / "run"), max_steps=8, per_device_train_batch_size=4,
        gradient_accumulation_steps=4, save_steps=2, logging_steps=1, use_cpu=True, report_to=[],
        disable_tqdm=True, remove_unused_columns=False,
    )
    data = [{"x": row} for row in rows]
    trainer = trainer(WithLoss(), args, train_dataset=data, callbacks=[Losses()])
    trainer.train(resume_from_checkpoint=any(folder.glob("run/checkpoint-*")))

PLAIN = transformers.Trainer
"""

ACCELERATE = """
import accelerate

def train(checkpoint_folder=torchguard.checkpoint_folder):
    torchguard.checkpoint_folder = checkpoint_folder
    root = folder / "run"
    root.mkdir(exist_ok=True)
    names = {"torch": torch, "torchguard": torchguard, "root": root, "log": logged}
    exec(page["accelerate"], {**names, "model": Model(), "rows": rows})

@contextlib.contextmanager
def PLAIN(path):
    path.mkdir(exist_ok=True)
    yield path
"""

LIGHTNING = """
import lightning
from torchguard.integrations.lightning import RetryMixin

class Net(RetryMixin, lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()
    def training_step(self, batch, index):
        loss = self.model(batch).square().mean()
        logged(self.trainer.fit_loop.epoch_loop.total_batch_idx, loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

exec(page["lightning"])

def train(*guards):
    torchguard.install(*(guards or ("save", "load")))
    newest = folder / "run" / "last.ckpt"
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        newest.parent, filename="last", enable_version_counter=False
    )
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, callbacks=[checkpoints, RandomState()],
        accumulate_grad_batches=4, enable_progress_bar=False, enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(rows[:32], batch_size=4, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path=newest if newest.exists() else None)

PLAIN = "resize"  # any guard but those of files
"""

END = """
def status(name, kill, *given):
    "Train in a fork; return its status."
    global folder, place
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        folder, place = folder / name, kill
        folder.mkdir(exist_ok=True)
        torch.manual_seed(2)
        train(*given)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

assert status("right", "") == 0
for kill, ends in {"save": -9, "forward": -9, "interrupted forward": 1}.items():
    assert status("killed", kill) == ends, kill
assert status("killed", "save") == -9
assert status("killed", "") == 0
# Without the guard the first kill is the end.
assert status("plain", "save", PLAIN) == -9
assert status("plain", "", PLAIN) == 1
"""


def losses(folder: Path) -> dict[int, float]:
    """Return the newest loss of each step: what is run again counts once."""
    return dict(json.loads(line) for line in (folder / "losses").read_text("utf-8").splitlines())


@pytest.mark.parametrize(
    ("library", "program"),
    [("transformers", TRAINER), ("lightning", LIGHTNING), ("accelerate", ACCELERATE)],
    ids=["Trainer", "Lightning", "accelerate"],
)
def test_kills_and_ctrl_c_leave_the_losses_of_a_run_that_nothing_stops(
    library: str, program: str, tmp_path: Path
) -> None:
    """Bit for bit, with shuffled rows, BatchNorm and dropout."""
    pytest.importorskip(library)
    pytest.importorskip("accelerate" if library == "transformers" else library)
    output_of(BEGIN + program + END, str(tmp_path), json.dumps(PAGE))
    right = losses(tmp_path / "right")
    assert len(right) >= 8
    assert losses(tmp_path / "killed") == right
