"""Tests import the flat files of the repository root and run on one thread, so that timings and rounding do not depend on the machine."""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)
