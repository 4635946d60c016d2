"""Triton kernels in Triton's interpreter, which is chosen when Triton is imported: in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 240
ROOT = Path(__file__).parents[1]


def cases_agree(module: str) -> str:
    """What `module`, which compares kernels with torch when it is run, printed. Fails with what it
    wrote to stderr."""
    run = subprocess.run(
        [sys.executable, "-m", module],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
