"""Log-probabilities against float64, at the sizes of real vocabularies, and the same bits for beams as for anybody."""

from __future__ import annotations

import pytest
import torch

from quire.sampling.logprobs import rank_candidates, token_logprobs

ROWS = 24


def logits(vocab: int, spread: float) -> torch.Tensor:
    found = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    return found + 17.0


@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_the_error_has_no_side_and_does_not_add_up_along_a_text(vocab: int, spread: float) -> None:
    """torch's log_softmax in float32 is off by 1.5e-5 to 4e-5 on Arm, always to the same side: the mean shows it."""
    values = logits(vocab, spread)
    exact = values.double().log_softmax(-1)
    found = token_logprobs(values, torch.arange(ROWS), 8)
    errors = found.logprob.double() - exact.gather(1, torch.arange(ROWS)[:, None]).squeeze(1)
    best = found.top_logprobs.double() - exact.gather(1, found.top_ids)
    for each in (errors, best):
        # Half a unit in the last place of a number between 8 and 16 is 5e-7, and of a logit's distance from the peak.
        assert float(each.abs().max()) < 2e-6
        assert abs(float(each.mean())) < 5e-7


@pytest.mark.parametrize("vocab", [97, 49_152, 151_936])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_candidates_of_beams_are_the_log_probabilities_bit_by_bit(vocab: int, temperature: float) -> None:
    values = logits(vocab, 2.0)
    counts = [1 + row % 8 for row in range(ROWS)]
    ranked = rank_candidates(values, counts, [temperature] * ROWS)
    scaled = values if temperature == 1.0 else values / torch.full((ROWS, 1), temperature)
    told = token_logprobs(scaled, scaled.argmax(-1), 8)
    assert torch.equal(ranked.ids, told.top_ids) and torch.equal(ranked.logprobs, told.top_logprobs)
    assert torch.equal(ranked.logprobs[:, 0], told.logprob)
    rows = zip(counts, ranked.to_list(), told.top_ids.tolist(), told.top_logprobs.tolist(), strict=True)
    for count, mine, ids, logprobs in rows:
        assert mine == list(zip(ids, logprobs, strict=True))[:count]


def test_candidates_of_a_row_do_not_depend_on_the_others() -> None:
    values = logits(49_152, 2.0)
    together = rank_candidates(values, [4] * ROWS, [1.0] * ROWS)
    for row in range(0, ROWS, 7):
        alone = rank_candidates(values[row : row + 1], [4], [1.0])
        assert torch.equal(alone.ids[0], together.ids[row]) and torch.equal(alone.logprobs[0], together.logprobs[row])


def test_a_row_that_is_not_finite_has_no_candidates_and_spares_the_others() -> None:
    values = logits(97, 2.0)[:3]
    values[1, 5] = float("nan")
    found = rank_candidates(values, [2, 2, 2], [1.0, 1.0, 1.0]).to_list()
    assert found[1] is None and found[0] is not None and found[2] is not None
    assert len(found[0]) == 2
