"""Give the fake device to every process of Python that has this folder in PYTHONPATH."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import fake_device

if fake_device.why_not() is None:
    fake_device.load()
