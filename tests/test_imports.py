"""Who may import whom: the arrows of docs/architecture.md, read from the sources.

All imports count, those inside functions too, except under ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("dashboard", "odc", "predictor", "profiler")
EVERYTHING = (*OURS, "torch", "numpy", "pyarrow", "plotly", "*")

# The longest prefix of a module's name says what it may import beside itself and the standard
# library; "*" is every package from outside that is not named in HEAVY.
HEAVY = ("torch", "sklearn", "dash", "plotly", "pyarrow", "numpy")
ALLOWED: dict[str, tuple[str, ...]] = {
    "profiler": ("numpy", "pyarrow"),
    "profiler.capture": ("profiler", "numpy", "pyarrow", "torch"),
    "odc": ("odc",),
    "odc.errors": (),
    "odc.sizes": ("odc.errors",),
    "odc.memory": ("numpy", "odc.errors", "odc.sizes"),
    "odc.memory.replay.lp": ("numpy", "scipy", "odc.memory", "odc.errors"),
    "odc.memory.engines.cuda": ("torch", "odc.errors", "odc.sizes"),
    "odc.sharding": ("numpy", "odc.errors", "odc.sizes"),
    "odc.fsdp": ("torch", "odc.memory", "odc.sharding", "odc.errors", "odc.sizes"),
    "odc.monitor": ("odc", "profiler"),
    "predictor": ("torch", "sklearn", "numpy", "odc.memory", "odc.errors", "profiler", "*"),
    "dashboard": ("dash", "plotly", "numpy", "pyarrow", "profiler", "odc.memory.replay", "*"),
    "odc.train": EVERYTHING,
    "odc.cli": EVERYTHING,
}
# The one exception to the arrows: visualize() imports the dashboard inside the call.
EXCEPTIONS = {("profiler", "dashboard")}


def sources() -> Iterator[tuple[str, Path]]:
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(tree: ast.AST, module: str, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(imported module, whether inside a function), without those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from imports(other, module, inside)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = ".".join(module.split(".")[: -node.level])
                yield (f"{base}.{node.module}" if node.module else base), inside
            else:
                yield from ((f"{node.module}.{alias.name}", inside) for alias in node.names)
        else:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, module, inside or function)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def rule_for(module: str) -> tuple[str, tuple[str, ...]]:
    prefix = max((p for p in ALLOWED if within(module, p)), key=len)
    return prefix, ALLOWED[prefix]


def is_allowed(module: str, imported: str, inside: bool) -> bool:
    prefix, allowed = rule_for(module)
    top = imported.split(".")[0]
    if top in sys.stdlib_module_names or top == "__future__":
        return True
    if within(imported, prefix) or any(within(imported, a) for a in allowed if a != "*"):
        return True
    if inside and (module.split(".")[0], top) in EXCEPTIONS:
        return True
    return "*" in allowed and top not in OURS and top not in HEAVY


@pytest.mark.parametrize("package", OURS)
def test_imports_follow_the_arrows(package):
    wrong = [
        f"{module} imports {imported}"
        for module, path in sources()
        if module.split(".")[0] == package
        for imported, inside in imports(ast.parse(path.read_text()), module)
        if not is_allowed(module, imported, inside)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_check_sees_what_it_should():
    text = (
        "import torch\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dash\n"
        "def f():\n    from odc.fsdp import paged\n"
    )
    found = dict(imports(ast.parse(text), "odc.memory.plan"))
    assert found == {"torch": False, "typing.TYPE_CHECKING": False, "odc.fsdp.paged": True}
    assert not is_allowed("odc.memory.plan", "torch", False)
    assert not is_allowed("odc.memory.plan", "odc.fsdp.paged", True)
    assert is_allowed("odc.fsdp.group", "torch.nn", False)
    assert not is_allowed("odc.fsdp.group", "profiler.schema", False)
    assert is_allowed("profiler.session", "dashboard.app", True)
    assert not is_allowed("profiler.session", "dashboard.app", False)
    assert not is_allowed("dashboard.app", "odc.memory.pager", False)


def light_modules() -> list[str]:
    """What has to work where torch is slow to load, or missing."""
    return [
        module
        for module, _ in sources()
        if rule_for(module)[0]
        in (
            "odc",
            "odc.errors",
            "odc.sizes",
            "odc.memory",
            "odc.sharding",
            "odc.monitor",
            "profiler",
            "dashboard",
        )
    ]


def test_torch_is_loaded_only_by_those_who_need_it():
    program = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None  # an import of it raises\n"
        f"for name in {light_modules()!r}:\n"
        "    importlib.import_module(name)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
