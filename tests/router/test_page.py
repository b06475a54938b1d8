"""The router's page: who holds what, who got what and why, in a real browser."""

from __future__ import annotations

import httpx

from tests.router.fakes import FakeServer, fakes, routed
from tests.router.test_passage import PLAIN, breaks, post
from tests.server.browser import Watched, chromium


def test_it_shows_servers_and_decisions() -> None:
    good, bad = FakeServer(), FakeServer(breaks())
    with fakes(good, bad) as urls, routed(urls, health_interval=60.0) as (address, _), chromium() as browser:
        for _ in range(4):
            assert post(address, PLAIN).status_code == 200
        watched = Watched(browser, address)
        page = watched.open()
        page.wait_for_selector("#servers tr:nth-child(2)")
        rows = [row.inner_text() for row in page.query_selector_all("#servers tr")]
        assert urls[0] in rows[0] and "up" in rows[0] and "down" in rows[1] and "closed the connection" in rows[1]
        assert len(page.query_selector_all("#decisions tr")) == 5  # four requests, one of them twice
        assert "its turn" in page.inner_text("#decisions")
        assert "policy: round-robin" in page.inner_text("#policy")
        assert not watched.complaints
        watched.close()


def test_it_can_be_left_out() -> None:
    with routed([], server={"page": False}) as (address, _):
        assert httpx.get(address).status_code == 404
