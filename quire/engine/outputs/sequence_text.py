"""The text of one sequence: detokenized as tokens come, checked for stop strings."""

from __future__ import annotations

from quire.engine.outputs.detokenizer import StopStrings, TextDecoder, make_detokenizer
from quire.sampling.params import SamplingParams


class SequenceText:
    """In pieces, as they may be shown, and as a whole."""

    __slots__ = ("_detokenizer", "_include_stop", "_min_tokens", "_num_tokens", "_pieces", "_stops", "num_chars")

    def __init__(self, params: SamplingParams, tokenizer: TextDecoder | None) -> None:
        self._detokenizer = None
        if params.detokenize and tokenizer is not None:
            self._detokenizer = make_detokenizer(tokenizer, params.skip_special_tokens)
        self._include_stop = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop_strings, self._include_stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self.num_chars = 0
        """Of all pieces."""

    def whole(self) -> str:
        """All that may be shown so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Text that may be shown after one more token; see `stop_string` for whether it is the last."""
        self._num_tokens += 1
        if self._detokenizer is None:
            return ""
        return self._show(self._detokenizer.push(token_id))

    def push_stop_token(self, token_id: int) -> str:
        """The token that ended the sequence: not part of the text unless asked for."""
        if self._include_stop:
            return self.push(token_id)
        self._num_tokens += 1
        return ""

    def finish(self) -> str:
        """The rest of the text, now that no token will follow."""
        if self._detokenizer is None or self._stops.matched is not None:
            return ""
        rest = self._show(self._detokenizer.finish())
        if self._stops.matched is None:
            held = self._stops.finish()
            self._keep(held)
            rest += held
        return rest

    def _show(self, text: str) -> str:
        shown = self._stops.push(text, armed=self._num_tokens >= self._min_tokens) if text else ""
        if shown:
            self._keep(shown)
        return shown

    def _keep(self, text: str) -> None:
        self._pieces.append(text)
        self.num_chars += len(text)
