"""Results of steps as bytes: from the rank that draws tokens to the scheduler's side."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from quire.ranks.fields import FieldReader, FieldWriter
from quire.sampling.token_logprobs import LogprobRecord, is_record
from quire.scheduler.plan import EntryResult, StepResult, TransferReport

_HEAD = Struct("<qII")
_ENTRY = Struct("<Bi")
_REPORT = Struct("<qq?")
_LOGS, _PROMPT_LOGS, _CANDIDATES, _ERROR, _TREE, _UNDRAFTABLE = 1, 2, 4, 8, 16, 32


def encode_result(result: StepResult) -> bytearray:
    out = FieldWriter()
    entries = result.entries
    out.data += _HEAD.pack(result.step, len(entries), len(result.arrivals))
    for report in result.arrivals:
        _write_report(out, report)
    plain = all([len(entry.tokens) == 1 and entry.logprobs is None and entry.prompt_logprobs is None
                 and entry.candidates is None and entry.error is None and not entry.num_drafts
                 and not entry.undraftable for entry in entries])
    out.data.append(plain)
    if plain:
        out.column("i", [entry.tokens[0] for entry in entries])
        return out.data
    for entry in entries:
        _write_entry(out, entry)
    return out.data


def decode_result(data: bytes) -> StepResult:
    step, num_entries, num_reports = _HEAD.unpack_from(data)
    source = FieldReader(data, _HEAD.size)
    reports = [_read_report(source) for _ in range(num_reports)]
    if source.take(1)[0]:
        entries = [EntryResult([token]) for token in source.column("i", num_entries)]
    else:
        entries = [_read_entry(source) for _ in range(num_entries)]
    if not source.at_end:
        raise ValueError("a result is followed by bytes that are no part of it")
    return StepResult(step, entries, reports)


def encode_reports(reports: Sequence[TransferReport]) -> bytearray:
    """Of transfers, apart from a step."""
    out = FieldWriter()
    for report in reports:
        _write_report(out, report)
    return out.data


def decode_reports(data: bytes) -> list[TransferReport]:
    source, found = FieldReader(data), []
    while not source.at_end:
        found.append(_read_report(source))
    return found


def _write_report(out: FieldWriter, report: TransferReport) -> None:
    out.data += _REPORT.pack(report.number, report.num_done, report.finished)
    _write_error(out, report.error)


def _read_report(source: FieldReader) -> TransferReport:
    number, num_done, finished = _REPORT.unpack(source.take(_REPORT.size))
    return TransferReport(number, num_done, finished, _read_error(source))


def _write_error(out: FieldWriter, error: str | None) -> None:
    out.data.append(error is not None)
    if error is not None:
        out.text(error)


def _read_error(source: FieldReader) -> str | None:
    return source.text() if source.take(1)[0] else None


def _write_entry(out: FieldWriter, entry: EntryResult) -> None:
    has = (_LOGS * (entry.logprobs is not None) | _PROMPT_LOGS * (entry.prompt_logprobs is not None)
           | _CANDIDATES * (entry.candidates is not None) | _ERROR * (entry.error is not None)
           | _TREE * bool(entry.parents) | _UNDRAFTABLE * entry.undraftable)
    out.data += _ENTRY.pack(has, entry.num_drafts)
    out.numbers("i", entry.tokens)
    for found in (entry.logprobs, entry.prompt_logprobs):
        if found is not None:
            out.number(len(found))
            for one in found:
                out.blob(one)
    if entry.candidates is not None:
        out.numbers("i", [token for token, _ in entry.candidates])
        out.numbers("d", [logprob for _, logprob in entry.candidates])
    if entry.error is not None:
        out.text(entry.error)
    if entry.parents:
        out.numbers("i", entry.parents)
        out.numbers("i", entry.kept)


def _read_entry(source: FieldReader) -> EntryResult:
    has, num_drafts = _ENTRY.unpack(source.take(_ENTRY.size))
    entry = EntryResult(source.numbers("i"), num_drafts=num_drafts, undraftable=bool(has & _UNDRAFTABLE))
    if has & _LOGS:
        entry.logprobs = [_read_record(source) for _ in range(source.number())]
    if has & _PROMPT_LOGS:
        entry.prompt_logprobs = [_read_record(source) for _ in range(source.number())]
    if has & _CANDIDATES:
        tokens = source.numbers("i")
        entry.candidates = list(zip(tokens, source.floats(), strict=True))
    if has & _ERROR:
        entry.error = source.text()
    if has & _TREE:
        entry.parents = tuple(source.numbers("i"))
        entry.kept = tuple(source.numbers("i"))
    return entry


def _read_record(source: FieldReader) -> LogprobRecord:
    record = source.blob()
    if not is_record(record):
        raise ValueError(f"{len(record)} bytes are no log-probabilities of a token")
    return record
