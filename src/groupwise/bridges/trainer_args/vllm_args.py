"""vLLM: TRL's arguments (`vllm.yaml`), and Axolotl's section `vllm:`, which starts the server."""

from __future__ import annotations

from groupwise.config.formats.translation import Translation


def put_vllm(t: Translation, p: str, *, lora: bool, mode: str | None = None, flag: str | None = None) -> None:
    """Set `engine` and `vllm` from TRL's arguments with the prefix `p`; a given `mode` overrides the file's.

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
    for key in t.keys.values():
        if key.name.startswith("vllm.") and key.fate == "made":
            t.put(key.here[0], t[key.name], key.name)


def _put_place(t: Translation, p: str, mode: str) -> None:
    """Put where the server is, or that the process has vLLM itself."""
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
