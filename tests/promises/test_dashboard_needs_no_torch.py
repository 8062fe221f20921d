"""The dashboard opens on a machine that has no torch, and opens quickly."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, time
start = time.perf_counter()
import dashboard.app, dashboard.report
assert "torch" not in sys.modules, "dashboard imported torch"
assert not any(name.split(".")[0] in ("odc", "predictor") for name in sys.modules)
print(time.perf_counter() - start)
"""


def test_importing_the_dashboard_imports_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
