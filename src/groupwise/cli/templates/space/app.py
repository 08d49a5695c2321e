"""A chat with the model that settings.json names, for a Space of the Hugging Face hub or any machine: `python app.py`.

settings.json   model: the repository; base: the base model where that holds a LoRA adapter, else null; loaded_by: the
                class of transformers that loads the one or the other; system: the system message, or null;
                template_kwargs: what the chat template is told; max_tokens; temperature
A private model needs a secret HF_TOKEN in the Space's settings.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers

SETTINGS = json.loads(Path(__file__).with_name("settings.json").read_text(encoding="utf-8"))


@functools.cache
def load() -> tuple[Any, Any]:
    """Return the tokenizer and the model, on a GPU if there is one."""
    source = SETTINGS["base"] or SETTINGS["model"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model: Any = getattr(transformers, SETTINGS["loaded_by"]).from_pretrained(source)
    if SETTINGS["base"]:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, SETTINGS["model"])
    return tokenizer, model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def reply(message: str, history: list[dict[str, Any]]) -> str:
    """Return the model's answer to a message behind a conversation."""
    tokenizer, model = load()
    system = [{"role": "system", "content": SETTINGS["system"]}] if SETTINGS["system"] else []
    said = [{"role": each["role"], "content": _text(each["content"])} for each in history]
    inputs = tokenizer.apply_chat_template(
        [*system, *said, {"role": "user", "content": message}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **SETTINGS["template_kwargs"],
    ).to(model.device)
    warm = SETTINGS["temperature"] > 0
    how: dict[str, Any] = {"do_sample": True, "temperature": SETTINGS["temperature"]} if warm else {"do_sample": False}
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=SETTINGS["max_tokens"], **how)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _text(content: Any) -> str:
    """Return what a message of Gradio says: a string, or the texts of its parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


if __name__ == "__main__":
    import gradio  # pyright: ignore[reportMissingImports]

    gradio.ChatInterface(reply, title=SETTINGS["model"]).launch()
