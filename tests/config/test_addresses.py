"""URLs of servers that a user names."""

from __future__ import annotations

import pytest

from groupwise.config.addresses import has_certificate, is_local, is_server_url


@pytest.mark.parametrize(
    ("url", "valid"),
    [
        ("http://localhost:8420", True),
        ("HTTPS://judge.example/v1", True),
        ("http://[::1]:8000", True),
        ("ftp://example.com", False),
        ("localhost:8420", False),
        ("http://", False),
        ("http://[::1", False),
        ("http://example.com:port", False),
        ("http://example.com:0", False),
        ("http://example.com:70000", False),
    ],
)
def test_what_is_the_url_of_a_server(url: str, valid: bool) -> None:
    assert is_server_url(url) is valid


def test_a_certificate_is_checked_however_https_is_written() -> None:
    assert [has_certificate(f"{scheme}://example.com") for scheme in ("https", "HTTPS", "Https", "http", "HTTP")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_what_is_on_this_machine() -> None:
    here = ["http://localhost:1", "http://127.0.0.1", "http://127.8.0.1:80", "https://[::1]:2", "HTTP://LOCALHOST"]
    there = ["http://localhost.example.com", "http://10.0.0.1", "https://example.com", "http://128.0.0.1"]
    assert all(map(is_local, here)) and not any(map(is_local, there))
