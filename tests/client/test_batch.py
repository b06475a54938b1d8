"""Batch files: what is refused with its line, and what a run that was killed finds done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.client.batch import BatchOutput, read_batch
from quire.errors import InvalidRequestError


def line(custom_id: str = "a", **changes: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions",
                       "body": {"prompt": "x"}} | changes)


def batch(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_requests_are_read_in_order_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    found = list(read_batch(batch(tmp_path, line("a"), "", line("b", url="/v1/chat/completions"))))
    assert [(one.number, one.custom_id, one.path) for one in found] == [
        (1, "a", "/v1/completions"), (3, "b", "/v1/chat/completions")]


@pytest.mark.parametrize(("bad", "says"), [
    ("{", "not JSON"), ("[]", "not a JSON object"), (line(""), "custom_id"), (line(method="GET"), "method"),
    (line(url="/v1/embeddings"), "url"), (line(body=[]), "body"), (line(body={"stream": True}), "stream"),
    (line("first"), "line 1"),
])
def test_a_wrong_line_is_refused_with_its_number(tmp_path: Path, bad: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match="line 2") as caught:
        list(read_batch(batch(tmp_path, line("first"), bad)))
    assert says in str(caught.value)


def test_a_torn_last_line_is_cut_off_and_done_again(tmp_path: Path) -> None:
    requests = list(read_batch(batch(tmp_path, line("a"), line("b"))))
    path = tmp_path / "out.jsonl"
    with BatchOutput(path) as output:
        for request in requests:
            output.write(request, "id", 200, {"id": "id"})
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with BatchOutput(path) as output:
        assert output.finished == {"a": None}
        output.write(requests[1], "id", 200, {"id": "id"})
    assert path.read_bytes() == whole


def test_a_file_that_is_no_output_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "letters.txt"
    path.write_text("dear all\n")
    with pytest.raises(InvalidRequestError, match="no answer of a batch"):
        BatchOutput(path)
    assert path.read_text() == "dear all\n"


def test_an_answer_that_failed_says_so(tmp_path: Path) -> None:
    request = next(read_batch(batch(tmp_path, line("a"))))
    path = tmp_path / "out.jsonl"
    with BatchOutput(path) as output:
        output.write(request, "r1", 400, {"error": {"message": "too long"}})
    found = json.loads(path.read_text())
    assert found["error"] == {"code": "400", "message": "too long"}
    assert found["response"]["status_code"] == 400
