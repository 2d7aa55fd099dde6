"""A URL is refused as a local folder."""

import pytest

import mula
from mula.fingerprints import Log


def test_log_is_no_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mula.Error, match="is a URL"):
        Log("s3://bucket/logs", "plan", 4, 1, 0, 1, 0)
    assert list(tmp_path.iterdir()) == []
