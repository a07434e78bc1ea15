"""The ``hullspeed`` command: finds the subcommand, prints errors, gives the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from cyclopts.config import Env, Toml
from rich.console import Console

from hullspeed import __version__
from hullspeed.errors import BrokenStackError, HullspeedError

COMMANDS = {
    "up": "Pull, plan, preflight, serve, verify and bench a model; one report.",
    "plan": "Will this model fit and meet the objective, on which hardware, at what cost?",
    "simulate": "What would my traffic see: latencies, goodput, cache hits, capacity, cost?",
    "preflight": "Is the stack whole, from driver to model files? A gate with an exit code.",
    "serve": "Serve a model over the OpenAI API.",
    "verify": "Is an endpoint correct?",
    "bench": "How fast is an endpoint, at which load, within which objective?",
    "launch": "The exact command or manifest for vLLM, SGLang, TensorRT-LLM or Transformers.",
    "explain-log": "What a vLLM or SGLang start-up log means, and what it leaves out.",
    "calibrate": "Measure this machine's ceilings, for plan and up.",
    "pull": "Fetch a model's files, check them and keep them.",
    "quantize": "Make an FP8, INT8 or INT4 checkpoint from a 16-bit one.",
}

ENGINE_PACKAGES = {"torch", "numba", "tokenizers", "jinja2", "starlette", "uvicorn"}

EPILOGUE = """
Example: `hullspeed up` serves and measures a small model on this machine.

Options come from flags, then `HULLSPEED_<COMMAND>_<OPTION>`, then `hullspeed.toml`.
Exit codes: 0 fine, 1 a finding or a missed objective, 2 usage, 3 broken environment.
"""


def build_app(chosen: str = "") -> App:
    """The application; a subcommand's module is imported when it runs.

    ``chosen`` is the subcommand about to run: its help is its own, not the line in the list.
    """
    app = App(
        name="hullspeed",
        help="Will this workload run well on this serving system?",
        help_epilogue=EPILOGUE,
        help_format="markdown",
        suppress_keyboard_interrupt=False,  # our own word for it, below
        version=__version__,
        config=[
            Env("HULLSPEED_", command=True),
            Toml("hullspeed.toml", search_parents=True),
        ],
        result_action="return_value",
    )
    for name, text in COMMANDS.items():
        module = name.replace("-", "_")
        line = {} if name == chosen else {"help": text}
        app.command(f"hullspeed.cli.{module}:{module}", name=name, **line)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        result = build_app(next(iter(arguments), ""))(
            list(arguments), exit_on_error=False, print_error=False
        )
    except CycloptsError as error:
        errors.print(f"[bold red]error:[/] {_escape(str(error).strip())}")
        return 2
    except HullspeedError as error:
        errors.print(f"[bold red]error:[/] {_escape(str(error))}")
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in ENGINE_PACKAGES:
            raise
        errors.print(
            f"[bold red]error:[/] this command runs the embedded engine, which needs {error.name}. "
            "Install it with: pip install 'hullspeed\\[engine]'"
        )
        return BrokenStackError.exit_code
    except KeyboardInterrupt:
        errors.print("interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our output went away (``hullspeed ... | head``): nothing left to say.
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


def main() -> None:
    """Entry point of the installed script."""
    sys.exit(run(sys.argv[1:]))
