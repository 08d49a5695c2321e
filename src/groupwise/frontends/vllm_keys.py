"""How other systems reach and run vLLM, as our `engine` and `vllm`: TRL's arguments, which Axolotl and aitraining have
too, and Axolotl's `vllm:` section, which starts the server."""

from __future__ import annotations

from groupwise.frontends.keys import Key, absent, all_idle, anything, boolean, integer, made, mapping, number, one_of
from groupwise.frontends.keys import text as string
from groupwise.frontends.translation import Translation

_WITH = "with use_vllm"
_STARTED = "of a server that is started: `groupwise vllm-serve` reads this file"

TRL_VLLM_KEYS = (
    made("use_vllm", boolean, "engine", default=False, what="true is engine: vllm"),
    made("vllm_mode", one_of("server", "colocate"), "vllm.mode", default="colocate", what=_WITH),
    made("vllm_server_base_url", string, "vllm.urls", what="with vllm_mode server"),
    made("vllm_server_host", string, "vllm.urls", default="0.0.0.0", what="... or its host; 0.0.0.0 is this machine"),
    made("vllm_server_port", integer, "vllm.urls", default=8000, what="... and port"),
    made("vllm_server_timeout", number, "vllm.start_timeout_s", default=240.0, what="with vllm_mode server"),
    made("vllm_gpu_memory_utilization", number, "vllm.gpu_memory_utilization", default=0.3, what=_WITH),
    made("vllm_max_model_length", integer, "vllm.max_model_len", what=_WITH),
    made("vllm_tensor_parallel_size", integer, "vllm.tensor_parallel_size", default=1, what=_WITH),
    made("vllm_enable_sleep_mode", boolean, "vllm.sleep", default=False, what="with vllm_mode colocate"),
    *all_idle("versions go to the server as files", "vllm_group_port"),
    *all_idle("vLLM chooses its own", "vllm_model_impl"),
    absent("vllm_structured_outputs_regex", "the engine samples freely", off=()),
)
AITRAINING_VLLM_KEYS = (
    *(key for key in TRL_VLLM_KEYS if key.name in ("use_vllm", "vllm_mode")),
    made("vllm_server_url", string, "vllm.urls", what="with vllm_mode server; /v1 behind it is cut off"),
    *(key for key in TRL_VLLM_KEYS if key.name in ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")),
    *all_idle("a server has the GPUs that it was started on (vllm.gpus)", "vllm_server_gpus"),
)
SECTION = {
    "host": (string, "vllm.host"),
    "port": (integer, "vllm.port"),
    "tensor_parallel_size": (integer, "vllm.tensor_parallel_size"),
    "gpu_memory_utilization": (number, "vllm.gpu_memory_utilization"),
    "dtype": (one_of("auto", "float32", "bfloat16", "float16"), "vllm.dtype"),
    "max_model_len": (integer, "vllm.max_model_len"),
    "enable_prefix_caching": (boolean, "vllm.enable_prefix_caching"),
    "enforce_eager": (boolean, "vllm.enforce_eager"),
}
OURS = {"python": string, "environment": mapping, "log": string, "arguments": anything}
AXOLOTL_SECTION_KEYS: tuple[Key, ...] = (
    *(made(f"vllm.{name}", kind, to, what=_STARTED) for name, (kind, to) in SECTION.items()),
    *(made(f"vllm.{name}", kind, f"vllm.{name}", what="ours; not a key there") for name, kind in OURS.items()),
    *all_idle("several servers are several vllm.urls", "vllm.data_parallel_size"),
    *all_idle("the server is vLLM's own", "vllm.serve_module", "vllm.worker_extension_cls", "vllm.device"),
    *all_idle("thoughts stay in the text", "vllm.enable_reasoning", "vllm.reasoning_parser"),
)


def put_vllm(t: Translation, p: str, *, lora: bool, mode: str | None = None, flag: str | None = None) -> None:
    """`engine` and `vllm` from TRL's arguments with the prefix `p`; `mode` is what it is whatever the file says.

    Without an adapter, which `lora` says, it is refused; `flag` is the switch that trains one,
    without which vLLM is what is given up.
    """
    use = f"{p}use_vllm"
    own = [name for name in t.keys if t.given(name) and any(to.startswith("vllm.") for to in t.keys[name].here)]
    if not t[use]:
        for name in own:
            t.note_idle(name, f"it acts with {use}")
        return
    if not lora:
        what = "vLLM is handed adapters, and here all parameters are trained"
        if flag is None:
            t.refuse(use, what, instead=f"{use}=false")
        else:
            t.refuse(use, f"{what}; --{flag} trains one", instead=f"{flag}=true")
        return
    t.put("engine", "vllm", use)
    chosen: str = mode or t[f"{p}vllm_mode"]
    t.put("vllm.mode", chosen, f"{p}vllm_mode")
    _put_place(t, p, chosen)
    for name in ("gpu_memory_utilization", "tensor_parallel_size"):
        t.put(f"vllm.{name}", t[f"{p}vllm_{name}"], f"{p}vllm_{name}")
    if f"{p}vllm_max_model_length" in t.keys:
        t.put("vllm.max_model_len", t[f"{p}vllm_max_model_length"], f"{p}vllm_max_model_length")
    for name, (_, to) in SECTION.items():
        if f"vllm.{name}" in t.keys:
            t.put(to, t[f"vllm.{name}"], f"vllm.{name}")
    for name in OURS:
        if f"vllm.{name}" in t.keys:
            t.put(f"vllm.{name}", t[f"vllm.{name}"], f"vllm.{name}")


def _put_place(t: Translation, p: str, mode: str) -> None:
    """Where the server is, or that the process has vLLM itself."""
    url, host, port = f"{p}vllm_server_base_url", f"{p}vllm_server_host", f"{p}vllm_server_port"
    url = url if url in t.keys else f"{p}vllm_server_url"
    wait, sleep = f"{p}vllm_server_timeout", f"{p}vllm_enable_sleep_mode"
    if mode == "colocate":
        for name in (url, host, port, wait):
            if t.given(name):
                t.note_idle(name, "it acts with vllm_mode server")
        t.put("vllm.sleep", (t[sleep] or None) if sleep in t.keys else None, sleep)
        return
    if t.given(sleep):
        t.note_idle(sleep, "it acts with vllm_mode colocate")
    if t.given(url):
        t.put("vllm.urls", [t[url]], url)
    elif host in t.keys:
        here = "127.0.0.1" if t[host] == "0.0.0.0" else t[host]
        t.put("vllm.urls", [f"http://{here}:{t[port]}"], host, port)
    if wait in t.keys:
        t.put("vllm.start_timeout_s", float(t[wait]), wait)
