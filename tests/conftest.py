"""Tests import the root's files, and run on one thread: rounding is the same on every machine."""
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)


@pytest.fixture
def no_curve(request, monkeypatch):
    """Half a second a picture: drawn once, by the module's fixture `finished`, where it is looked at."""
    import runtime
    if "finished" not in request.fixturenames:
        monkeypatch.setattr(runtime, "plot_curve", lambda *arguments, **more: None)


@pytest.fixture(autouse=True)
def own_signals():
    """A run that a test cuts off leaves its handlers behind; Ctrl-C must still end the tests."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
