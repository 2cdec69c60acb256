"""Where a measured program is installed: a virtual environment of its own that sees the packages that are here, so that
PyTorch is not installed a second time; what it needs in another version shadows them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from .children import PeerError, last_line
from .table import Peer

INSTALL_SECONDS = 1800  # llama-cpp-python is compiled


def python_of(peer: Peer, folder: Path) -> Path:
    """Its interpreter, installed under ``folder`` unless it is there. Raises PeerError with pip's last line."""
    if not peer.pip:
        return Path(sys.executable)
    torch = importlib.metadata.version("torch").split("+")[0]
    steps = [[argument.format(torch=torch) for argument in step] for step in peer.pip]
    home = folder / peer.name
    python, marker = home / "bin" / "python", home / "installed.json"
    if marker.is_file() and json.loads(marker.read_text(encoding="utf-8")) == steps:
        return python
    venv.create(home, with_pip=True, clear=True)
    inside = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (Path(inside) / "shared.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")
    for step in steps:
        run([str(python), "-m", "pip", "install", "--quiet", *step], home / "install.log", INSTALL_SECONDS)
    marker.write_text(json.dumps(steps), encoding="utf-8")
    return python


def run(command: list[str], log: Path, seconds: float, environment: dict[str, str] | None = None) -> None:
    """Run to the end with ``environment`` on top of this one, all output to ``log``. Raises PeerError with its last
    line."""
    with log.open("ab") as output:
        try:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=seconds,
                env=os.environ | (environment or {}),
            ).returncode
        except subprocess.TimeoutExpired:
            raise PeerError(f"took longer than {seconds:.0f} s: {' '.join(command[:5])} ...") from None
    if code:
        raise PeerError(last_line(log) or f"exit code {code}")
