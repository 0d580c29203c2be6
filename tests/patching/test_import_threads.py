"""Guards that are installed while another thread imports modules of torch, and in forks."""

from __future__ import annotations

import pytest

from support.child_process import output_of

pytestmark = pytest.mark.slow


def test_a_forked_child_has_the_guards_and_can_remove_them() -> None:
    program = """
        import os, torch, torchguard
        torchguard.install("resize")
        child = os.fork()
        if child == 0:
            torchguard.uninstall()
            os._exit("resize_" in vars(torch.Tensor))
        print(os.waitpid(child, 0)[1], "resize_" in vars(torch.Tensor))
    """
    assert output_of(program) == "0 True\n"


# Dynamo, whose import another thread has begun.
DYNAMO = """
    import os, sys, threading, time
    import torch, torchguard
    from torchguard._torch import patch

    def begin(name, until):
        thread = threading.Thread(target=__import__, args=(name,), daemon=True)
        thread.start()
        while until not in sys.modules:
            time.sleep(0.001)
        return thread

    def end(thread):
        thread.join(60)
        return not thread.is_alive()
"""


def test_a_scope_that_begins_while_dynamo_is_imported_sees_compiled_code() -> None:
    program = """
    with torchguard.guarded():
        pass
    thread = begin("torch._dynamo", "torch._dynamo")
    with torchguard.guarded("checks"):
        end(thread)
        call = torch.compile(lambda w, i: torch.embedding(w, i), backend="aot_eager")
        try:
            call(torch.ones(3, 2), torch.tensor([7]))
        except IndexError as error:
            print(type(error).__name__)
    """
    assert output_of(DYNAMO + program) == "IndexOutOfRangeError\n"


def test_a_guard_that_is_installed_while_its_module_is_imported_patches_it() -> None:
    name = "torch.distributed.checkpoint"
    program = f"""
    torchguard.install("resize", only_if_needed=False)
    thread = begin({name!r}, {name!r})
    torchguard.install("load", only_if_needed=False)
    end(thread)
    from {name} import load
    print(load is not patch.original("{name}.load"))
    """
    assert output_of(DYNAMO + program) == "True\n"
