"""What the server is told: defaults, secrets that do not show, and an open door that is refused."""

import json
from pathlib import Path

import pytest

from groupwise.config.serve import ServeConfig, is_loopback, serve_config
from groupwise.errors import ConfigError
from wording import raises

KEY = "sk-planted-0123456789"


def test_the_defaults_are_those_of_the_documentation() -> None:
    config = serve_config({}, environ={})
    assert (config.model, config.host, config.port, config.api_key) == ("starter", "127.0.0.1", 8420, None)
    assert config.state_dir == Path("groupwise-state")
    assert (config.chat_body_bytes, config.train_body_bytes, config.upload_bytes) == (8 << 20, 64 << 20, 2 << 30)
    assert (config.max_n, config.max_top_logprobs, config.max_stop) == (128, 20, 16)
    assert (config.max_messages, config.max_tools, config.max_batch_completions) == (2048, 128, 1024)
    assert (config.max_concurrent, config.max_waiting, config.max_queued_jobs) == (256, 1024, 32)


@pytest.mark.parametrize(
    ("model", "name", "served"),
    [
        ("starter", None, "starter"),
        ("Qwen/Qwen3-0.6B", None, "qwen3-0.6b"),
        ("/models/My Model", None, "my-model"),
        ("starter", "gpt-x", "gpt-x"),
        ("..", None, ".."),
    ],
)
def test_the_served_name_is_the_models_last_part(model: str, name: str | None, served: str) -> None:
    assert serve_config({"model": model, "served_model_name": name}, environ={}).served_name == served


def test_secrets_come_from_the_environment_unless_they_are_given() -> None:
    environ = {"GROUPWISE_API_KEY": KEY, "GROUPWISE_WEBHOOK_SECRET": "hook"}
    config = serve_config({"api_key": None}, environ=environ)
    assert (config.api_key, config.webhook_secret) == (KEY, "hook")
    assert serve_config({"api_key": "other"}, environ=environ).api_key == "other"
    assert serve_config({}, environ={"GROUPWISE_API_KEY": ""}).api_key is None


def test_secrets_show_nowhere() -> None:
    config = serve_config({"api_key": KEY, "webhook_url": f"https://u:{KEY}@example.com/{KEY}?x={KEY}"}, environ={})
    shown = json.dumps(config.public())
    assert KEY not in shown and "example.com" in shown
    assert KEY not in repr(serve_config({"api_key": KEY, "webhook_secret": KEY}, environ={}))


@pytest.mark.parametrize("secret", [f"{KEY} x", f"{KEY}\n", f"{KEY}é", 918273645, [KEY], "x" * 5000])
def test_a_wrong_secret_does_not_show_in_its_error(secret: object) -> None:
    with raises(ConfigError, field="api_key", kind="conflict") as refused:
        serve_config({"api_key": secret}, environ={})
    assert KEY not in str(refused.value) and "918273645" not in str(refused.value) and "xxxx" not in str(refused.value)


RATERS = {"prompts": {"source": "known.jsonl"}, "rewards": ["groupwise.rewards.text:exact_match"]}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", ""])
def test_a_public_address_needs_an_api_key(host: str) -> None:
    with raises(ConfigError) as refused:
        serve_config({"host": host}, environ={})
    assert refused.value.exit_code == 2
    if host:
        assert serve_config({"host": host, "api_key": KEY}, environ={}).host == host


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        *[("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True)],
        *[("0.0.0.0", False), ("::", False), ("localhost.evil.com", False), ("127.0.0.1.nip.io", False)],
    ],
)
def test_loopback(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"prt": 1}, "prt"),
        ({"adapter_dir": "x"}, "adapter_dir"),
        ({"port": "8420"}, "port"),
        ({"port": 70000}, "port"),
        ({"max_n": True}, "max_n"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s"),
        ({"cors_origins": ["*"]}, "cors_origins"),
        ({"cors_origins": ["https://a.example/path"]}, "cors_origins"),
        ({"served_model_name": "a b"}, "served_model_name"),
        ({"learn": {"adapter": "a", "max_share": 0.5, "proven": 2}}, "learn.proven"),
        ({"learn": {"adapter": "a", "proven": 2}, "raters": RATERS}, "learn.proven"),
    ],
)
def test_wrong_settings_are_refused(data: dict[str, object], field: str) -> None:
    with raises(ConfigError, field=field):
        serve_config(data, environ={})


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, field in ServeConfig.model_fields.items() if not field.description] == []
