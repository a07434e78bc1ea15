"""The documentation of the findings, written from the table of codes.

``python -m hullspeed.preflight.docs > docs/findings.md``
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from hullspeed.preflight.codes import LINKS, Code, codes

_INTRO = """\
# Findings of the gate

Written from `src/hullspeed/preflight/codes.toml` by `python -m hullspeed.preflight.docs`; a test
keeps both equal. A code never changes its meaning. Words in ⟨brackets⟩ are filled with what
was seen.

An *error* closes the gate: exit 3 when the environment itself is wrong, 1 when the launch does not
suit it. `--override CODE` lets one error stand by its name. A *warning* is printed, an *info* is
what to know about a launch that is sound.
"""


def render() -> str:
    """``docs/findings.md``."""
    return "\n".join(_parts())


def _parts() -> Iterator[str]:
    yield _INTRO
    yield "| code | link | severity | finding |"
    yield "|---|---|---|---|"
    for name, code in codes().items():
        yield f"| [{name}](#{name.lower()}) | {code.link} | {code.severity.value} | {code.title} |"
    for link in LINKS:
        yield f"\n## {link}"
        for name, code in codes().items():
            if code.link == link:
                yield from _section(name, code)


def _section(name: str, code: Code) -> Iterator[str]:
    exit_code = 3 if code.broken else 1
    closes = f" (exit {exit_code})" if code.severity.value == "error" else ""
    yield f'\n<a id="{name.lower()}"></a>\n### {name}: {code.title}\n'
    yield f"{code.severity.value.capitalize()}{closes}.\n"
    yield f"- **What.** {_shown(code.what)}."
    yield f"- **Why.** {_shown(code.why)}"
    yield f"- **Evidence.** {_shown(code.looks_at)}."
    yield f"- **Fix.** {_shown(code.fix)}"


def _shown(template: str) -> str:
    return re.sub(r"{(\w+)}", r"⟨\1⟩", template).replace("_", "\\_")


if __name__ == "__main__":
    sys.stdout.write(render() + "\n")
