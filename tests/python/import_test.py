"""What is said when the package does not fit the torch that is here."""

import os
import subprocess
import sys

import pytest
import torch

import sirtaki
import sirtaki.torch as hvd

pytestmark = pytest.mark.skipif(hvd.size() > 1, reason="in processes of their own; once is enough")


def _import_with(folder, torch_version):
    """Imports a copy of the package that claims to be built with that torch."""
    package = folder / "sirtaki"
    package.mkdir()
    of = os.path.dirname(os.path.abspath(sirtaki.__file__))
    for name in os.listdir(of):
        if name != "_build.py":
            os.symlink(os.path.realpath(os.path.join(of, name)), package / name)
    (package / "_build.py").write_text(f'version = "0.1.0"\ntorch_version = "{torch_version}"\nmpi = launcher = ""\n')
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_"))}
    environment["PYTHONPATH"] = str(folder) + os.pathsep + environment.get("PYTHONPATH", "")
    return subprocess.run([sys.executable, "-W", "ignore", "-c", "import sirtaki.torch; print(sirtaki.torch.__file__)"],
                          env=environment, capture_output=True, text=True, timeout=240)


def test_another_torch_is_refused_by_name(tmp_path):
    done = _import_with(tmp_path, "1.13.1+cu117")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and "1.13.1+cu117" in last and torch.__version__ in last, done.stderr


def test_another_build_of_the_same_torch_serves(tmp_path):
    series = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    done = _import_with(tmp_path, f"{series}.99+cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def _main(*arguments):
    return subprocess.run([sys.executable, "-m", "sirtaki", *arguments], capture_output=True, text=True, timeout=240)


def test_the_doctor_is_the_launcher():
    done = _main("--doctor")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Sirtaki {sirtaki.__version__}, ") and "\nTo do:" in done.stdout


def test_the_prefix_for_cmake_has_its_files():
    done = _main("--cmake-prefix-path")
    if done.returncode == 0:   # installed
        assert os.path.exists(os.path.join(done.stdout.strip(), "lib", "cmake", "Sirtaki", "SirtakiConfig.cmake"))
        assert done.stdout.strip() == sirtaki.cmake_prefix_path()
    else:
        assert "`cmake --install` makes a prefix" in done.stderr
        with pytest.raises(FileNotFoundError, match="cmake --install"):
            sirtaki.cmake_prefix_path()
