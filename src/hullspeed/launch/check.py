"""Check: what is wrong or obsolete in an old command, why, and today's form of it."""

from __future__ import annotations

import functools
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files

import msgspec

from hullspeed.findings import Finding, Severity
from hullspeed.launch.flagtable import FlagTable, Match, preferred_value
from hullspeed.launch.knownmodels import nearest_model
from hullspeed.launch.oldcommand import OldCommand, read_commands
from hullspeed.launch.oldtrt import rewrite_trt
from hullspeed.launch.versions import image_name, newest


class CheckCode(msgspec.Struct, frozen=True, kw_only=True):
    """One row of ``check_codes.toml``."""

    title: str
    severity: Severity
    what: str
    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class Checked:
    """One command after the check.

    Attributes:
        today: The command as it is written today, ready for a shell; with a file's content below
            for TensorRT-LLM.
    """

    engine: str
    version: str
    findings: tuple[Finding, ...]
    today: str


@functools.cache
def check_codes() -> dict[str, CheckCode]:
    """Every code of ``launch --check``."""
    text = files("hullspeed.launch").joinpath("check_codes.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, CheckCode])


def found(code: str, **evidence: object) -> Finding:
    """The finding ``code`` with its texts filled."""
    row = check_codes()[code]
    shown = {name: str(value) for name, value in evidence.items()}
    return Finding(
        code=code,
        severity=row.severity,
        what=row.what.format(**shown),
        why=row.why.format(**shown),
        evidence={name: value for name, value in shown.items() if name not in ("why", "fix")},
        fix=row.fix.format(**shown),
    )


def check_text(text: str, version: str | None = None) -> list[Checked]:
    """Check every engine command in ``text``.

    Args:
        text: A command line, or a script with several.
        version: Engine version to check against; the image's, else the newest known.

    Raises:
        UsageError: if no engine's command is found, or the version is outside the flag table.
    """
    commands = read_commands(text)
    old_trt = [command for command in commands if _is_old_trt(command)]
    checked = [check_command(command, version) for command in commands if command not in old_trt]
    if old_trt:
        checked.append(_check_trt(old_trt))
    return checked


def check_command(command: OldCommand, version: str | None = None) -> Checked:
    """Check one command."""
    version = version or command.image_version or newest(command.engine)
    work = _Work(command, FlagTable(command.engine, version))
    work.run()
    return Checked(command.engine, work.table.version, tuple(work.findings), work.today())


def _is_old_trt(command: OldCommand) -> bool:
    return command.entry[:1] in (("trtllm-build",), ("convert_checkpoint.py",))


def _check_trt(commands: list[OldCommand]) -> Checked:
    now, config, faults = rewrite_trt(commands)
    findings = [found("LC009", tool=command.entry[0], now=now) for command in commands]
    findings += [found("LC012", flags=flags, why=why, fix=fix) for flags, why, fix in faults]
    return Checked("trtllm", newest("trtllm"), tuple(findings), f"{now}\n\n# serve.yaml\n{config}")


@dataclass
class _Work:
    """One check under way: arguments are taken in order, findings and words collected."""

    command: OldCommand
    table: FlagTable
    findings: list[Finding] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    model: str | None = None
    model_flag: str = ""

    def run(self) -> None:
        self._entry()
        arguments = list(self.command.arguments)
        if arguments and not arguments[0].startswith("-"):
            self.model = arguments.pop(0)
        while arguments:
            self._argument(arguments)
        self._check_model()
        if self.command.image and self.command.image_version is None:
            now = image_name(self.table.engine, self.table.version)
            self._say("LC008", image=self.command.image, now=now)

    def _say(self, code: str, **evidence: object) -> None:
        shared = {"engine": self.table.engine, "version": self.table.version}
        self.findings.append(found(code, **{**shared, **evidence}))

    def _entry(self) -> None:
        old = " ".join(self.command.entry)
        if old == "python -m vllm.entrypoints.openai.api_server":
            why = "vllm serve has the same options and takes the model as its first argument"
            self._say("LC006", old=old, now="vllm serve MODEL", why=why)
        elif old == "python -m vllm.entrypoints.api_server":
            why = "the demonstration server without the OpenAI API is not for production"
            self._say("LC006", old=old, now="vllm serve MODEL", why=why)
        elif old == "python -m sglang.launch_server":
            why = "it still works; sglang serve is the documented command"
            self._say("LC006", old=old, now="sglang serve --model-path MODEL", why=why)

    def _argument(self, rest: list[str]) -> None:
        written = rest.pop(0)
        if not written.startswith("-"):
            self._say("LC002", flag=self._last_flag(), value=written, now=self._last_flag())
            return
        name, joined, value = written.partition("=")
        short = self._short(name)
        match = self.table.match(short)
        if match is None or match.abbreviated:
            self._unknown(short, match, _take_value(value if joined else None, rest, match))
            return
        self._known(name, match, value if joined else None, rest)

    def _short(self, name: str) -> str:
        aliases = {
            alias: flag for flag, row in self.table.flags.items() for alias in row.aliases
        }  # fmt: skip
        return aliases.get(name, name) if not name.startswith("--") else name

    def _last_flag(self) -> str:
        return next((word for word in reversed(self.words) if word.startswith("-")), "the command")

    def _unknown(self, name: str, match: Match | None, values: list[str]) -> None:
        """A flag that does not exist: gone, an abbreviation of another, or misspelt."""
        gone = self.table.gone(name)
        if match is not None and gone is None:
            # An abbreviation of what was meant, as --tp for --tp-size: written out.
            now = " ".join([match.name, *values])
            self._say("LC004", flag=name, meant=match.name, now=now)
            self.words += [match.name, *values]
            return
        now = gone.now.format(value=" ".join(values) or "2") if gone else ""
        if match is not None and not match.name.startswith(f"{name}-size"):
            self._say("LC004", flag=name, meant=match.name, now=now or "nothing")
        elif match is None:
            self._say("LC001", flag=name, fix=self._how(name, now, gone.why if gone else ""))
        self.words += shlex.split(now)

    def _how(self, name: str, now: str, why: str) -> str:
        if why:
            return f"write {now} ({why})" if now else f"leave it out: {why}"
        near = self.table.nearest(name)
        return f"did you mean {near}?" if near else "leave it out"

    def _known(self, written: str, match: Match, value: str | None, rest: list[str]) -> None:
        flag, name = match.flag, match.name
        takes = flag.kind not in ("bool", "switch") or bool(match.key)
        if not takes:
            self._switch(written, match, value, rest)
            return
        values = [value] if value is not None else _take_value(None, rest, match)
        if not values and flag.kind not in ("optional",):
            self._say("LC011", flag=name, kind=_KINDS.get(flag.kind, "a value"), value="nothing")
            return
        if self._is_model(name):
            self.model, self.model_flag = values[0], written
            return
        self._deprecated(written, match)
        self._risks(name, values)
        values = self._checked_values(match, values)
        gone = self.table.gone(name) if flag.deprecated else None
        if gone:
            self.words += shlex.split(gone.now.format(value=" ".join(values)))
        else:
            self.words += [written if match.key else name, *values]

    def _switch(self, written: str, match: Match, value: str | None, rest: list[str]) -> None:
        extra = value
        if extra is None and rest and not rest[0].startswith("-"):
            extra = rest.pop(0)
        off = extra is not None and extra.lower() in ("false", "0", "no", "off")
        now = self._switch_now(match, negated=match.negated != off)
        if extra is not None:
            self._say(
                "LC002", flag=match.name, value=extra, now=now or "nothing (it is the default)"
            )
        self._deprecated(written, match)
        self._risks(match.name, [])
        gone = self.table.gone(match.name) if match.flag.deprecated else None
        self.words += shlex.split(gone.now.format(value="2") if gone else now)

    def _switch_now(self, match: Match, *, negated: bool) -> str:
        if match.name == "--enable-chunked-prefill" and not negated:
            return ""  # on by default since the V1 engine
        if not negated:
            return match.name
        return f"--no-{match.name[2:]}" if match.flag.kind == "bool" else ""

    def _deprecated(self, written: str, match: Match) -> None:
        if match.flag.deprecated:
            gone = self.table.gone(match.name)
            why = f"{gone.why}." if gone else "It will be removed."
            fix = self._how(match.name, gone.now.format(value="...") if gone else "", why[:-1])
            self._say("LC005", flag=written, why=why, fix=fix)

    def _checked_values(self, match: Match, values: list[str]) -> list[str]:
        flag, name, value = match.flag, match.name, values[0] if values else ""
        better = preferred_value(self.table.engine, name, value)
        if flag.choices and value not in flag.choices and not match.key:
            now = f"{name} {better.now}" if better else f"{name} with one of the values it takes"
            why = f"{better.why}." if better else f"It takes {', '.join(flag.choices)}."
            self._say("LC003", flag=name, value=value, now=now, why=why)
        elif better:
            self._say("LC010", flag=name, value=value, now=better.now, why=f"{better.why}.")
        elif flag.kind in ("int", "float") and not match.key and not _is_number(value, flag.kind):
            self._say("LC011", flag=name, kind=_KINDS[flag.kind], value=value)
        return [better.now, *values[1:]] if better else values

    def _risks(self, name: str, values: list[str]) -> None:
        """What works and should not be done."""
        if name.replace("_", "-") == "--trust-remote-code":
            self._say("LC015", flag=name)
        # A variable in place of the key is expanded by the shell: only a literal is written down.
        if name == "--api-key" and values and not values[0].startswith("$"):
            env = {"vllm": "set VLLM_API_KEY in the environment of the server"}
            fix = env.get(self.table.engine, "pass it through a variable, or keep a proxy in front")
            self._say("LC016", flag=name, fix=fix)

    def _is_model(self, name: str) -> bool:
        return name in ("--model", "--model-path")

    def _check_model(self) -> None:
        now = {"vllm": "vllm serve MODEL", "sglang": "sglang serve --model-path MODEL"}
        shown = now.get(self.table.engine, "MODEL")
        if self.model is None:
            if self.table.engine != "transformers":
                self._say("LC013", now=shown)
            return
        if self.table.engine == "vllm" and self.model_flag == "--model":
            self._say("LC014", now=f"vllm serve {self.model}")
        near = nearest_model(self.model)
        if near is not None:
            fix = f"did you mean {near}?" if near else "check the name"
            org = self.model.partition("/")[0]
            self._say("LC007", model=self.model, org=org, fix=fix)
            self.model = near or self.model

    def today(self) -> str:
        """The command as it is written today."""
        return " ".join(map(quoted, [*self._container(), *self._start(), *self.words]))

    def _container(self) -> list[str]:
        if not self.command.image:
            return []
        pinned = self.command.image_version is not None
        image = self.command.image if pinned else image_name(self.table.engine, self.table.version)
        return [*self.command.docker, image]

    def _start(self) -> list[str]:
        model = self.model or "MODEL"
        match self.table.engine:
            case "vllm":  # the image's entry point is vllm serve
                return [model] if self.command.image else ["vllm", "serve", model]
            case "sglang":
                return ["sglang", "serve", "--model-path", model]
            case "trtllm":
                return ["trtllm-serve", model]
        return ["transformers", "serve", *([self.model] if self.model else [])]


_KINDS = {"int": "a whole number", "float": "a number", "json": "JSON"}


def _take_value(joined: str | None, rest: list[str], match: Match | None) -> list[str]:
    """The values after a flag; a flag that is not known takes at most one word."""
    if joined is not None:
        return [joined]
    if match is not None and match.flag.kind in ("bool", "switch"):
        return []
    most = len(rest) if match is not None and match.flag.kind == "list" else 1
    values: list[str] = []
    while rest and len(values) < most and not _is_flag(rest[0]):
        values.append(rest.pop(0))
    return values


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _is_number(word, "float")


def _is_number(text: str, kind: str) -> bool:
    body = text.rstrip("kKmMgGtT") if kind == "int" else text
    if body in ("auto", "None"):
        return True
    try:
        float(body)
    except ValueError:
        return False
    return kind == "float" or "." not in body or body != text


def quoted(word: str) -> str:
    """``word`` for a shell; a home directory at its beginning stays open to expansion."""
    if word.startswith("~/"):
        return f"~/{shlex.quote(word[2:])}"
    return shlex.quote(word)


def walk(checked: list[Checked]) -> Iterator[Finding]:
    """Every finding of every command."""
    for one in checked:
        yield from one.findings
