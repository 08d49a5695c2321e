"""`chat` of a run and of a server: the template and what it is told hold wherever chats are rendered."""

import pickle

import pytest

from groupwise.config.chat import ChatConfig
from groupwise.config.serve import ServeConfig
from groupwise.errors import ConfigError
from groupwise.model.chat import CompletionEncoder, configure_chat, decode, encode_bridge, encode_prompt, opens_thought
from groupwise.model.load import load_configured, load_tokenizer
from groupwise.model.supervised import encode_supervised
from groupwise.types import Prompt
from wording import raises

ASKED = {"role": "user", "content": "What is 4+5?"}
SAID = {"role": "assistant", "content": "9"}
EMPTY = "<think>\n\n</think>\n\n"
OWN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ hint }}{% endif %}"
)


def rendered(tokenizer, *messages, **options) -> str:
    prompt = encode_prompt(Prompt(id="1", messages=messages or (ASKED,)), tokenizer, **options)
    return decode(prompt.token_ids, tokenizer, ends=())


def tokenizer_of(folder=None, **chat):
    return load_tokenizer("starter", chat=ChatConfig(**chat), **({} if folder is None else {"folder": folder}))


def test_thoughts_are_switched_off_wherever_a_chat_is_rendered():
    off, plain = tokenizer_of(template_kwargs={"enable_thinking": False}), tokenizer_of()
    assert rendered(off) == rendered(plain) + EMPTY
    assert rendered(off, template_kwargs={"enable_thinking": True}) == rendered(plain)  # a request goes before
    assert rendered(pickle.loads(pickle.dumps(off))) == rendered(off)  # as in the process that reads requests
    prompt = Prompt(id="1", messages=(ASKED,))
    for tokenizer in (off, plain):  # what is posted as text follows the prompt that was sampled from
        ids = (*encode_prompt(prompt, tokenizer).token_ids, *CompletionEncoder(prompt, tokenizer).encode("9"))
        assert decode(ids, tokenizer, ends=()) == rendered(tokenizer) + "9<|im_end|>"
    bridge = encode_bridge([ASKED, SAID], [ASKED], off)
    assert bridge is not None and decode(bridge, off, ends=()).endswith(EMPTY)
    sample = encode_supervised([ASKED, SAID], off)
    trained = [id for id, mask in zip(sample.completion_ids, sample.mask, strict=True) if mask]
    assert decode(trained, off, ends=()) == "9<|im_end|>"
    assert decode((*sample.prompt_ids, *sample.completion_ids), off, ends=()).count(EMPTY) == 1


@pytest.mark.parametrize("said", ["file", "text", "name"])
def test_a_template_in_the_place_of_the_models_own(tmp_path, said):
    (tmp_path / "own.jinja").write_text(OWN)
    tokenizer = load_tokenizer("starter")
    if said == "name":
        tokenizer.chat_template = {"default": tokenizer.chat_template, "own": OWN}
    template = {"file": "own.jinja", "text": OWN, "name": "own"}[said]
    configure_chat(tokenizer, ChatConfig(template=template, template_kwargs={"hint": "> "}), folder=tmp_path)
    assert rendered(tokenizer) == "[user] What is 4+5?\n> "


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        ({"template": "none.jinja"}, "chat.template"),
        ({"template_kwargs": {"reasoning_effort": "low"}}, "chat.template_kwargs.reasoning_effort"),
        ({"template": OWN, "template_kwargs": {"enable_thinking": True}}, "chat.template_kwargs.enable_thinking"),
    ],
)
def test_what_would_change_nothing_is_refused(tmp_path, chat, said):
    with raises(ConfigError) as caught:
        tokenizer_of(tmp_path, **chat)
    assert caught.value.field == said


def test_switching_off_thoughts_that_a_model_does_not_have_is_no_error():
    assert rendered(tokenizer_of(template=OWN, template_kwargs={"enable_thinking": False})) == "[user] What is 4+5?\n"


@pytest.mark.parametrize("words", ["The result is", "<think>\n", "It is 9, no: "])
def test_the_policy_goes_on_with_what_it_has_begun(words):
    tokenizer = load_tokenizer("starter")
    opening = {"role": "assistant", "content": words}
    prompt = encode_prompt(Prompt(id="1", messages=(ASKED, opening)), tokenizer)
    assert decode(prompt.token_ids, tokenizer, ends=()) == rendered(tokenizer) + words
    assert opens_thought(prompt.token_ids, tokenizer) == words.startswith("<think>")


def test_a_server_and_a_run_load_their_model_so(tmp_path):
    (tmp_path / "own.jinja").write_text(OWN)
    config = ServeConfig(chat=ChatConfig(template="own.jinja", template_kwargs={"hint": "> "}), folder=tmp_path)
    assert rendered(load_configured(config, device="cpu").tokenizer) == "[user] What is 4+5?\n> "
