"""Importing this module imports the compiler, which takes as long as torch itself.

The doctor has ``multiprocessing``'s server import it once, for all of its probes.
"""

from __future__ import annotations

import contextlib
import importlib

# Only a head start: a probe that needs one of these itself reports what is wrong with it.
with contextlib.suppress(Exception):
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor.compile_fx")
    # Finding out which vector instructions work here takes two compilations: once is enough.
    importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()
