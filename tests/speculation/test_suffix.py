"""Cached continuations come from recent outputs of the same tenant and salt, and from nowhere else."""

from __future__ import annotations

from quire.speculation.suffix import SuffixSource


def finished(source: SuffixSource, prompt: list[int], output: list[int], domain: object) -> None:
    proposer = source.open(prompt, len(prompt), domain)
    proposer.extend(output)
    proposer.finish()


def test_an_output_of_the_same_domain_is_continued() -> None:
    source = SuffixSource(1, 1000)
    finished(source, [1, 2, 3], [10, 11, 12, 13], "a")
    proposer = source.open([7, 3, 10], 2, "a")
    assert proposer.propose(8).tokens == (11, 12, 13)
    assert proposer.propose(8).evidence == 2


def test_the_first_token_matches_the_end_of_an_earlier_prompt() -> None:
    source = SuffixSource(1, 1000)
    finished(source, [1, 2, 3], [10, 11, 12, 13], "a")
    assert source.open([1, 2, 3], 3, "a").propose(3).tokens == (10, 11, 12)


def test_nothing_crosses_domains() -> None:
    source = SuffixSource(1, 1000)
    finished(source, [1, 2, 3], [10, 11, 12, 13], ("tenant", b"salt"))
    for domain in (("tenant", b""), ("other", b"salt"), ("", b"")):
        assert source.open([1, 2, 3], 3, domain).propose(3).tokens == ()


def test_the_request_itself_is_searched_too_and_the_longer_match_wins() -> None:
    source = SuffixSource(1, 1000)
    finished(source, [9], [2, 50, 51], "a")
    proposer = source.open([1, 2, 30, 31, 1, 2], 6, "a")
    assert proposer.propose(2).tokens == (30, 31)


def test_what_is_kept_is_bounded_and_the_newest_half_of_it_stays() -> None:
    source = SuffixSource(1, 100)
    for i in range(50):
        finished(source, [1], [1000 + i, 2000 + i, 3000 + i], "a")
    held = source._domains["a"]
    assert held.num_tokens <= 110
    assert source.open([1049], 0, "a").propose(1).tokens == (2049,)
    assert source.open([1000], 0, "a").propose(1).tokens == ()


def test_a_running_sequence_finds_its_place_again_when_a_generation_is_forgotten() -> None:
    source = SuffixSource(1, 100)
    proposer = source.open([5, 6], 2, "a")
    for i in range(40):
        finished(source, [1], [1000 + i, 2000 + i, 3000 + i], "a")
    finished(source, [1], [5, 6, 77], "a")
    assert proposer.propose(1).tokens == (77,)


def test_domains_not_used_lately_are_forgotten() -> None:
    source = SuffixSource(1, 60)
    for tenant in range(20):
        finished(source, [1], [tenant + 100] * 9, tenant)
    assert sum(one.num_tokens for one in source._domains.values()) <= 60 + 20
    assert 19 in source._domains
    assert 0 not in source._domains
