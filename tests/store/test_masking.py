"""Secrets in text and configurations, before they leave this machine."""

from __future__ import annotations

import pytest

from groupwise.store.masking import MASK, Masking

KEY = "sk-" + "k" * 40


@pytest.mark.parametrize(
    "secret",
    [
        KEY,
        "hf_" + "a" * 34,
        "ghp_" + "A1" * 18,
        "AKIA" + "Q" * 16,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.SflKxwRJSM",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_what_has_the_shape_of_a_key_is_masked(secret):
    masking = Masking({})
    assert masking.text(f"it is {secret}, yes") == f"it is {MASK}, yes" and masking.count == 1


def test_values_of_the_environment_and_passwords_in_addresses_are_masked():
    masking = Masking({"MY_API_KEY": "swordfish-1", "DEBUG_TOKEN": "true", "HOME": "/home/somebody"})
    assert masking.text("swordfish-1 true /home/somebody") == f"{MASK} true /home/somebody"
    assert masking.text("http://me:pass@host/x") == f"http://{MASK}@host/x"
    assert masking.count == 2


def test_of_a_configuration_what_is_under_the_name_of_a_secret_is_masked():
    given = {"api_key": "x", "token": "y", "max_tokens": 8, "prompt_key": "question", "api_key_env": "MY_KEY"}
    masked = Masking({}).config({"args": [given]})
    assert masked == {"args": [given | {"api_key": MASK, "token": MASK}]}


def test_words_that_only_look_alike_stay():
    text = "task-force sk-1 hf_home ghost 3:4@5 the secret is 42"
    assert Masking({}).text(text) == text
