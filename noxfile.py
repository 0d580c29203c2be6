"""The suite on every version of torch that is supported: ``nox -s matrix``.

Each version is a download of gigabytes, so this is not part of CI. What a session
finds goes to ``.nox/results``; ``python docs/make_compatibility.py`` turns that into
the tables of ``docs/compatibility.md``. Options after ``--`` go to pytest:
``nox -s "matrix(torch-2.8.0)" -- -k resize``.
"""

from pathlib import Path

import nox

TORCH_VERSIONS = ("2.6.0", "2.8.0", "2.9.1", "2.11.0", "2.13.0", "2.15.0")
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
    RESULTS.mkdir(parents=True, exist_ok=True)
    session.install(f"torch=={torch}", "-e", ".[test]")
    # First, because a failing test ends the session. 1 says that a guard left a defect open,
    # which is part of the result.
    with (RESULTS / f"torch-{torch}.json").open("w", encoding="utf-8") as report:
        doctor = ("python", "-m", "torchguard", "doctor", "--json")
        session.run(*doctor, stdout=report, success_codes=[0, 1])
    junit = f"--junitxml={RESULTS / f'torch-{torch}.xml'}"
    session.run("python", "-m", "pytest", "-n", "auto", junit, *session.posargs)
