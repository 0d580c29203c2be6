"""Threads that import modules of torch while guards are installed, and what other threads do."""

from __future__ import annotations

import pytest

from support.child_process import output_of

pytestmark = pytest.mark.slow

# Modules of torch that take their time, made for the test.
MODULES = """
    import os, pathlib, sys, tempfile, threading, time
    import torch, torchguard
    from torchguard._torch import patch

    folder = tempfile.mkdtemp()
    torch.__path__.append(folder)

    def module(name, text):
        pathlib.Path(folder, f"{name}.py").write_text(text)

    def importing(name):
        thread = threading.Thread(target=__import__, args=(f"torch.{name}",), daemon=True)
        thread.start()
        return thread

    def in_force():
        return "resize_" in vars(torch.Tensor)

    torch.go_on = threading.Event()
    torch.began = threading.Event()
    module("tg_slow", "import torch; torch.began.set(); torch.go_on.wait(20)")
"""


def test_guards_come_and_go_while_another_thread_imports() -> None:
    """What is installed is in force when the import has ended, and what is undone is not.

    In a child of this process no other thread imports.
    """
    program = """
    torchguard.install("resize", only_if_needed=False)
    slow = importing("tg_slow")
    torch.began.wait(20)
    child = os.fork()
    if child == 0:
        print("in the child:", in_force(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    with torchguard.guarded():
        torchguard.uninstall()
        print(torchguard.installed())
        torchguard.install("out", only_if_needed=False)
        print(torchguard.installed())
        torch.go_on.set()
        slow.join(20)
        print("out" in torchguard.installed(), in_force())
    torchguard.uninstall()
    print(in_force(), type(torch.add).__name__)
    """
    assert output_of(MODULES + program).splitlines() == [
        "in the child: True",
        "('resize', 'out')",
        "('out', 'resize')",  # what is installed, then what scopes hold
        "True True",
        "False builtin_function_or_method",
    ]


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
