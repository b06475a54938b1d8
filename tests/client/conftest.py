"""Fixtures of the tests that talk to a stub of a server."""

from tests.client.stub import serving as serving
