"""What a process of `vllm_rollouts.py` does inside vLLM's own environment: `vllm.LLM`, asked over a Unix socket.

    python vllm_side.py SOCKET '{"llm": {options of vllm.LLM}, "adapter": "a directory, or null"}'

The socket is there when vLLM is up. In comes a list of requests, {"prompt": ids, and options of vllm.SamplingParams};
out goes a list for each, of its completions' ids and log-probabilities. Texts are made, and stay here.

Imports nothing of Groupwise: that environment need not have it. What vLLM says goes to the log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import Listener
from typing import Any

Completed = tuple[tuple[int, ...], tuple[float, ...]]


def completed(output: Any) -> list[Completed]:
    """The completions of one request, in order."""
    return [
        (
            tuple(each.token_ids),
            tuple(at[token].logprob for token, at in zip(each.token_ids, each.logprobs, strict=True)),
        )
        for each in sorted(output.outputs, key=lambda each: each.index)
    ]


def serve(socket: str, options: Mapping[str, Any]) -> None:
    """Answer one client until it leaves."""
    vllm: Any = import_module("vllm")
    lora: Any = import_module("vllm.lora.request")
    llm = vllm.LLM(**options["llm"])
    adapter = lora.LoRARequest("policy", 1, options["adapter"]) if options["adapter"] else None
    with Listener(socket, family="AF_UNIX") as listener, listener.accept() as line:
        while True:
            try:
                asked = line.recv()
            except EOFError:
                return
            prompts = [{"prompt_token_ids": list(each.pop("prompt"))} for each in asked]
            params = [vllm.SamplingParams(**each) for each in asked]
            outputs = llm.generate(prompts, params, lora_request=adapter, use_tqdm=False)
            line.send([completed(output) for output in outputs])


if __name__ == "__main__":  # vLLM's workers import this module again
    serve(sys.argv[1], json.loads(sys.argv[2]))
