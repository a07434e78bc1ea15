"""OldCommand: what a deployment's command line says, taken apart: container, engine, arguments."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace

from hullspeed.errors import UsageError

# docker options that take no value; all others take one, after "=" or as the next word.
_DOCKER_SWITCHES = frozenset(
    ("-d", "--detach", "-i", "--interactive", "-t", "--tty", "-it", "-ti", "-dit", "--rm", "--init",
     "--privileged", "--read-only", "-P", "--publish-all", "--no-healthcheck", "--oom-kill-disable")
)  # fmt: skip
_IMAGES = (
    ("sglang", "sglang"), ("vllm", "vllm"), ("tensorrt-llm", "trtllm"), ("tensorrt_llm", "trtllm"),
    ("tritonserver", "trtllm"), ("transformers", "transformers"),
)  # fmt: skip
_TAG_VERSION = re.compile(r"^v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:post|rc)\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OldCommand:
    """One command.

    Attributes:
        engine: ``vllm``, ``sglang``, ``trtllm`` or ``transformers``.
        entry: The words that start the engine: ``("vllm", "serve")``, ``("trtllm-build",)``; empty
            when the image's entry point does.
        arguments: Everything after them.
        docker: ``docker run`` and its options, without the image; empty outside a container.
        image: Image with its tag.
        env: Assignments before the command.
    """

    engine: str
    entry: tuple[str, ...]
    arguments: tuple[str, ...]
    docker: tuple[str, ...] = ()
    image: str = ""
    env: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        """The image's tag; ``latest`` when none is written."""
        name = self.image.rpartition("/")[2]
        return name.partition(":")[2].partition("@")[0] or "latest"

    @property
    def image_version(self) -> str | None:
        """The engine version that the tag names."""
        match = _TAG_VERSION.match(self.tag)
        return match[1] if match and self.image else None


def read_commands(text: str) -> list[OldCommand]:
    """Every engine command in a script: comments dropped, backslash lines joined.

    Raises:
        UsageError: for unbalanced quotes, or text in which no engine's command is found.
    """
    joined = re.sub(r"\\\s*\n", " ", text)
    commands = []
    for line in joined.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(
                f"cannot read the command: {error}", seen=line.strip()[:120], fix="close the quotes"
            ) from error
        if words and (command := _read(words)):
            commands.append(command)
    if not commands:
        raise UsageError(
            "no engine's command found", seen=text.strip()[:120],
            fix="give a vllm, sglang, trtllm or transformers command, or docker run of their image",
        )  # fmt: skip
    return commands


def _read(words: list[str]) -> OldCommand | None:
    env = []
    while words and re.match(r"^[A-Za-z_]\w*=", words[0]):
        env.append(words[0])
        words = words[1:]
    while words and words[0] in ("sudo", "exec", "nohup", "$"):
        words = words[1:]
    if words[:2] in (["docker", "run"], ["podman", "run"]):
        command = _docker(words)
    else:
        command = _bare(words)
    return replace(command, env=tuple(env)) if command else None


def _docker(words: list[str]) -> OldCommand | None:
    at = 2
    while at < len(words) and words[at].startswith("-"):
        alone = "=" in words[at] or words[at] in _DOCKER_SWITCHES
        at += 1 if alone else 2
    if at >= len(words):
        return None
    image, rest = words[at], words[at + 1 :]
    engine = next((engine for word, engine in _IMAGES if word in image.lower()), None)
    inner = _bare(rest)
    if inner is None and engine is None:
        return None
    if inner is None:
        inner = OldCommand(engine=engine or "", entry=(), arguments=tuple(rest))
    return replace(inner, docker=tuple(words[:at]), image=image)


def _bare(words: list[str]) -> OldCommand | None:
    if not words:
        return None
    first = words[0].rpartition("/")[2]
    if re.fullmatch(r"python[\d.]*", first):
        return _python(words)
    pairs = {("vllm", "serve"): "vllm", ("sglang", "serve"): "sglang",
             ("transformers", "serve"): "transformers"}  # fmt: skip
    pair = (first, words[1] if len(words) > 1 else "")
    if pair in pairs:
        return OldCommand(engine=pairs[pair], entry=pair, arguments=tuple(words[2:]))
    if first.startswith("trtllm-"):
        return OldCommand(engine="trtllm", entry=(first,), arguments=tuple(words[1:]))
    return None


def _python(words: list[str]) -> OldCommand | None:
    if len(words) > 2 and words[1] == "-m":
        engine = words[2].partition(".")[0]
        if engine in ("vllm", "sglang"):
            return OldCommand(
                engine=engine, entry=("python", "-m", words[2]), arguments=tuple(words[3:])
            )
        return None
    script = words[1].rpartition("/")[2] if len(words) > 1 else ""
    if script == "convert_checkpoint.py":
        return OldCommand(engine="trtllm", entry=(script,), arguments=tuple(words[2:]))
    return None
