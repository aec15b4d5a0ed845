"""What only Linux can do is left out on other systems, so that the demo has a chance to run on macOS.

pytest tests/test_platforms.py
"""

import ctypes
import gc
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import tasks._math_verify as math_verify
import utils
from report.writer import CODE

ROOT = Path(__file__).parent.parent


@pytest.fixture
def mac(monkeypatch):
    """Make this process believe that it runs on macOS, whose C library has no prctl."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())


def test_elsewhere_a_process_is_not_bound_to_its_parent(mac):
    utils.die_with_parent()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_on_linux_a_process_is_bound_to_its_parent():
    """PR_GET_PDEATHSIG, 2, reads what PR_SET_PDEATHSIG has set."""
    code = "import ctypes, utils; utils.die_with_parent(); signal = ctypes.c_int()\n"
    code += "ctypes.CDLL(None).prctl(2, ctypes.byref(signal)); print(signal.value)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "15\n"


def test_the_process_that_writes_pages_starts_elsewhere():
    as_mac = "import ctypes, sys; sys.platform, ctypes.CDLL = 'darwin', lambda _: object()\n"
    done = subprocess.run([sys.executable, "-c", as_mac + CODE], input=pickle.dumps(gc.collect), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_elsewhere_a_comparison_has_a_time_limit_but_no_memory_limit(mac, monkeypatch):
    monkeypatch.setattr(math_verify, "Path", lambda name: pytest.fail(f"{name} is read, which only Linux has"))
    before = resource.getrlimit(resource.RLIMIT_AS)
    with math_verify.limited_memory():
        assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_on_linux_a_comparison_has_a_memory_limit():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with math_verify.limited_memory():
        assert resource.getrlimit(resource.RLIMIT_AS)[0] > math_verify.MEMORY
        assert resource.getrlimit(resource.RLIMIT_AS) != before
    assert resource.getrlimit(resource.RLIMIT_AS) == before
