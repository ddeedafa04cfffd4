"""Where the files that travel with sentinel are: runbooks, dashboards, alert rules, units and example configuration.

This module exists so that the controller's ``/runbooks/NAME``, the links in pages and the tests find these files alike in a
checkout and in an installed wheel. What always holds:

* A wheel carries them under ``sentinel/share/KIND``; a checkout has them at its root as ``KIND``. The wheel's copy wins,
  because only a wheel has one.
* A name never leads outside its kind, so that a name taken from a URL can be handed over as it is.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

KINDS = ("runbooks", "dashboards", "alerts", "deploy")


def shipped(kind: str, name: str = "") -> Path:
    """The path of one shipped file (``shipped("runbooks", "gpu-off-bus.md")``) or, without a name, of the kind's folder.

    Raises FileNotFoundError, with a sentence that can be shown to whoever asked, when nothing of that name is shipped;
    ValueError when ``kind`` is none of KINDS.
    """
    if kind not in KINDS:
        raise ValueError(f"nothing of kind {kind!r} is shipped; wanted one of {', '.join(KINDS)}")
    package = Path(str(files("sentinel")))
    root = next((place for place in (package / "share" / kind, package.parent / kind) if place.is_dir()), None)
    if root is None:
        raise FileNotFoundError(f"this installation of sentinel at {package} came without its {kind}")
    if not name:
        return root
    # Looked up among the names that exist, never opened by the asked one: no spelling of a path can lead elsewhere.
    for found in root.rglob("*"):
        if found.relative_to(root).as_posix() == name and found.is_file():
            return found
    raise FileNotFoundError(f"no {kind} file is called {name[:80]!r}")


def runbook(fault: str) -> Path:
    """The page for one fault class (``gpu-off-bus``). Raises FileNotFoundError when there is none."""
    return shipped("runbooks", f"{fault}.md")
