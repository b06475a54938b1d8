"""`quire bench transfer`: a line for each transport and form, beside a copy and loopback TCP of the same run."""

from __future__ import annotations

import json

import pytest

from quire.cli.main import main
from quire.kvtransfer.transports import TRANSPORTS, transport


def test_every_transport_has_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--shape", "2", "2", "8", "--block-sizes", "4", "--blocks", "1", "6", "100",
                 "--most-tokens", "64", "--repeats", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in printed if line.startswith("{")]
    usable = [name for name in TRANSPORTS if transport(name).missing() is None]
    forms = {1: ["merged", "by token"], 6: ["merged", "scattered", "by token"]}
    wanted = {(name, form, count) for name in usable for count in forms for form in forms[count]}
    wanted |= {(name, "", count) for name in ("copy", "loopback") for count in forms}
    assert {(line["transport"], line["form"], line["blocks"]) for line in lines} == wanted
    assert {line["bytes"] for line in lines if line["blocks"] == 6} == {6 * 4 * 2 * 2 * 8 * 2 * 4}
    assert all(line["ms"] >= line["ms_best"] > 0 and line["share_of_copy"] > 0 for line in lines)
    assert any(line.startswith("RDMA: ") for line in printed)
    for name in set(TRANSPORTS) - set(usable):
        assert any(line.startswith(f"{name} is left out: ") for line in printed)


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--transports", "pigeon"]) != 0
    assert "no KV transport 'pigeon'" in capsys.readouterr().err
    assert main(["bench", "transfer", "--blocks", "0"]) != 0
    assert "--blocks" in capsys.readouterr().err
