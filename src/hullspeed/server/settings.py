"""ServerSettings: every knob of the API process, checked once before anything is bound."""

from __future__ import annotations

import ipaddress

import msgspec

from hullspeed.errors import UsageError
from hullspeed.units import MIB


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of the API process; numbers are caps unless the name says otherwise.

    Attributes:
        host: Address to listen on; anything but loopback needs a key.
        port: 0 takes a free one.
        api_keys: Keys that clients may use; kept out of ``repr`` and ``--print-config``.
        allowed_hosts: Names that requests without a key may carry in ``Host`` besides loopback
            names (a web page must not reach a keyless server through a name of its own).
        public_metrics: Serve ``/metrics`` without a key.
        max_body_bytes: Larger request bodies are answered 413.
        max_header_bytes: Sum of all header names and values of a request.
        header_deadline_s: From the first byte (or the connection) to the end of the headers.
        body_deadline_s: From the end of the headers to the end of the body.
        write_stall_s: A client that reads nothing for this long is cut off.
        keep_alive_s: How long an idle connection is kept.
        max_connections: Open connections; further ones are answered 503 and closed.
        max_prompts: Prompts in one completion request.
        max_sequences: Prompts times ``n`` of one request.
        drain_seconds: How long SIGTERM waits for requests in flight.
        retry_after_s: What 503 answers ask clients to wait.
        heartbeat_limit_s: An engine silent for longer is reported unhealthy.
        hang_limit_s: An engine silent for longer is killed and started again.
        max_restarts: Engine restarts within ``restart_window_s`` before giving up.
        restart_delay_s: Wait before the first restart; doubles with each further one.
        record: New file for a workload of the requests served; none unless given.
        record_salt: Of its prefix hashes; drawn anew unless given. Kept out of ``repr`` too.
        record_limit_bytes: Recording stops there.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    public_metrics: bool = False
    max_body_bytes: int = 32 * MIB
    max_header_bytes: int = 64 * 1024
    header_deadline_s: float = 10.0
    body_deadline_s: float = 30.0
    write_stall_s: float = 60.0
    keep_alive_s: int = 30
    max_connections: int = 4096
    max_prompts: int = 256
    max_sequences: int = 512
    drain_seconds: float = 30.0
    retry_after_s: int = 1
    heartbeat_limit_s: float = 30.0
    hang_limit_s: float = 120.0
    max_restarts: int = 5
    restart_window_s: float = 600.0
    restart_delay_s: float = 0.5
    record: str | None = None
    record_salt: str = ""
    record_limit_bytes: int = 256 * MIB

    def __repr__(self) -> str:
        return f"ServerSettings(host={self.host!r}, port={self.port}, keys={len(self.api_keys)})"

    def check(self) -> None:
        """Refuse settings that cannot be or that would open the server to strangers.

        Raises:
            UsageError: naming the option and what to do.
        """
        if not 0 <= self.port <= 65535:
            raise UsageError("--port is out of range", seen=self.port, fix="use 0 to 65535")
        for key in self.api_keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError(
                    "an API key must be at least 8 printable ASCII characters without spaces",
                    seen=f"{len(key)} characters",
                    fix="make one with: python -c 'import secrets; print(secrets.token_urlsafe())'",
                )
        if not self.api_keys and not is_loopback(self.host):
            raise UsageError(
                "listening beyond this machine needs an API key",
                seen=self.host,
                fix="pass --api-key or set HULLSPEED_API_KEY, or listen on 127.0.0.1",
            )
        if self.record_salt and len(self.record_salt) < 16:
            raise UsageError(
                "--record-salt must be at least 16 characters",
                seen=f"{len(self.record_salt)} characters",
                fix="leave it out, or make one with: openssl rand -hex 16",
            )
        if self.drain_seconds < 0:
            raise UsageError(
                "--drain-seconds is negative", seen=self.drain_seconds, fix="use 0 or more"
            )


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address, no port) can only mean this machine."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
