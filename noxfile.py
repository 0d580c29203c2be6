"""The suite on what is supported: ``nox -s matrix`` for torch, ``nox -s pythons`` for Python.

Each version is a download of gigabytes, so this is not part of a pull request's CI, which runs it
every week. What a session finds goes to ``.nox/results``; ``python docs/make_compatibility.py``
turns that into the table of ``docs/project/compatibility.md``. The tests are those of ``make
test``, without what does not depend on a version (``tests/repository``: pages, records, layout,
package). Options after ``--`` go to pytest: ``-k resize`` for a part, ``-m ""`` for the slow tests.
"""

from pathlib import Path

import nox

TORCH_VERSIONS = ("2.6.0", "2.8.0", "2.9.1", "2.11.0", "2.13.0", "2.15.0")
PYTHON_VERSIONS = ("3.10", "3.12", "3.13", "3.14")
RESULTS = Path(__file__).parent / ".nox" / "results"

nox.needs_version = ">=2024.10"
# uv where it is installed beside nox: it links packages that six environments share.
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.stop_on_first_error = False


@nox.session
@nox.parametrize("torch", [nox.param(version, id=f"torch-{version}") for version in TORCH_VERSIONS])
def matrix(session: nox.Session, torch: str) -> None:
    """Run the doctor and the tests on one version of torch."""
    session.install(f"torch=={torch}", "-e", ".[test]")
    # The command line depends on Python: nox -s pythons runs its tests. The whole table of the
    # doctor is what runs first anyway.
    left_out = ("--ignore", "tests/cli", "--ignore", "tests/defects/test_whole_table.py")
    examine(session, f"torch-{torch}", *left_out)


@nox.session(python=PYTHON_VERSIONS)
def pythons(session: nox.Session) -> None:
    """Run both on one version of Python, with the torch that constraints.txt pins."""
    session.install("-c", "constraints.txt", "-e", ".[test]")
    examine(session, f"python-{session.python}")


def examine(session: nox.Session, name: str, *options: str) -> None:
    """Leave what the doctor and the tests find under this name."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    # First, because a failing test ends the session. 1 says that a guard left a defect open,
    # which is part of the result.
    with (RESULTS / f"{name}.json").open("w", encoding="utf-8") as report:
        doctor = ("python", "-m", "torchguard", "doctor", "--json")
        session.run(*doctor, stdout=report, success_codes=[0, 1])
    described = session.run("git", "describe", "--always", "--dirty", external=True, silent=True)
    named = f"junit_suite_name={str(described).strip()}"
    junit = (f"--junitxml={RESULTS / f'{name}.xml'}", "-o", named)
    workers = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")
    tests = (*workers, "-m", "not slow", "--ignore", "tests/repository", *options, *junit)
    session.run("python", "-m", "pytest", *tests, *session.posargs)
