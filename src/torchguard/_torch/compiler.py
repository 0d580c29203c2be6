"""Importing this module imports the compiler, which takes as long as torch itself.

The doctor has ``multiprocessing``'s server import it once, for all of its probes.
"""

from __future__ import annotations

import contextlib

# Only a head start: a probe that needs one of these itself reports what is wrong with it.
with contextlib.suppress(Exception):
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401 - imported for whoever forks
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # Finding out which vector instructions work here takes two compilations: once is enough.
    pick_vec_isa()
