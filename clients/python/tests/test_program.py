"""The client finds the program that a wheel installed."""

import sysconfig

import pytest

import mula
from mula.server import program


def test_scripts_folder(monkeypatch, tmp_path):
    """Without MULA and PATH, the environment's program is used.

    It never replaces a named program.
    """
    script = tmp_path / "mula"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path) if name == "scripts" else None)
    monkeypatch.delenv("MULA", raising=False)
    monkeypatch.setenv("PATH", "")
    assert program(None) == str(script)
    with pytest.raises(mula.Error, match="there is no program other"):
        program("other")
