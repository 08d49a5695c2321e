"""Secrets in text and configurations, before they leave this machine."""

from __future__ import annotations

import pytest

from groupwise.store.masking import MASK, PERSONAL, SECRETS, Masking

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


@pytest.mark.parametrize(
    ("text", "masked", "rule"),
    [
        ("mail Bob.X+1@ex-ample.co.uk, now", "mail [email], now", "email"),
        ("call +49 170 1234567 or", "call [phone] or", "phone"),
        ("(555) 123-4567", "[phone]", "phone"),
        ("at 555-123-4567.", "at [phone].", "phone"),
        ("pay 4111 1111 1111 1111!", "pay [card]!", "card"),
        ("5500-0000-0000-0004", "[card]", "card"),
        ("to DE89 3704 0044 0532 0130 00 please", "to [iban] please", "iban"),
        ("GB82WEST12345698765432", "[iban]", "iban"),
        ("from 203.0.113.7:80", "from [ip]:80", "ip_address"),
        ("2001:db8:0:1::7 said", "[ip] said", "ip_address"),
        ("ssn 123-45-6789", "ssn [ssn]", "us_social_security"),
    ],
)
def test_personal_data_is_masked_where_that_is_asked(text: str, masked: str, rule: str):
    masking = Masking({}, rules=(*SECRETS, *PERSONAL))
    assert masking.text(text) == masked and masking.counts == {rule: 1}
    assert Masking({}).text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",  # no card: the sum does not fit
        "DE88 3704 0044 0532 0130 00",
        "version 1.2.3.4.5, 300.1.1.1, x[1::2], 12:30:45, 127.0.0.1, 00:1b:44:11:3a:b7",
        "2024-05-01T12:00:00Z 1717171717171 3.14159265358979 1,000,000,000",
        "123e4567-e89b-12d3-a456-426614174000",
        "a + 1, +1 +2, 555-1234, user@localhost, @handle, 900-12-3456",
    ],
)
def test_numbers_that_are_nobodys_stay(text: str):
    assert Masking({}, rules=PERSONAL).text(text) == text


def test_a_number_of_json_is_masked_as_a_text_is():
    masking = Masking({}, rules=PERSONAL)
    assert masking.value({"card": 4111111111111111, "n": 4111, "yes": True}) == {
        "card": "[card]",
        "n": 4111,
        "yes": True,
    }
    assert masking.counts == {"card": 1}


def test_the_rules_can_be_shown():
    named = [rule.name for rule in (*SECRETS, *PERSONAL)]
    assert len(set(named)) == len(named) and all(rule.says for rule in (*SECRETS, *PERSONAL))
