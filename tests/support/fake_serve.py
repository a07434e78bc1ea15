"""``hullspeed serve`` over the fake engine, as a process: ``fake_serve.py OPTIONS_AS_JSON``."""

from __future__ import annotations

import json
import sys

from hullspeed.errors import HullspeedError
from hullspeed.runtime.messages import Failed
from hullspeed.server.lifecycle import Started, serve
from hullspeed.server.settings import ServerSettings
from support.fake_engine import FakeLink, byte_texts


def announce(started: Started) -> None:
    """Tell the parent where the server is."""
    print(started.url, flush=True)


def main() -> int:
    """Serve; print an error as the command line does."""
    options = json.loads(sys.argv[1])
    step_s, load_s = options.pop("step_s", 0.001), options.pop("load_s", 0.0)
    fail = options.pop("fail", None)

    def link() -> FakeLink:
        return FakeLink(step_s=step_s, load_s=load_s, fail=Failed(*fail) if fail else None)

    try:
        return serve(
            ServerSettings(**{"port": 0, **options}),
            name="fake",
            max_waiting=1024,
            links=link,
            texts=byte_texts,
            announce=announce,
        )
    except HullspeedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
