"""Every error hullspeed raises on purpose.

HullspeedError                    something the caller can act on
├── UsageError                    a flag, option or combination that cannot be (exit 2)
├── ModelError                    the model's files (exit 2)
│   ├── SourceError               the files cannot be found, fetched or verified
│   ├── CorruptFileError          a file is cut short or contradicts itself
│   └── UnsupportedModelError     understood, but not something we can size or run
├── RequestError                  one request is wrong; the process goes on (HTTP 400)
│   ├── ContextOverflowError      prompt + asked tokens exceed the context (HTTP 400)
│   └── UnknownModelError         a model name that is not served here (HTTP 404)
├── CapacityError                 correct, but it does not fit in the memory there is (exit 1)
├── BrokenStackError              driver, runtime or package missing or mismatched (exit 3)
└── EngineError                   the engine stopped; requests in flight failed (HTTP 503)
    └── IntegrityError            our own bookkeeping contradicts itself: a bug, never input
"""

from __future__ import annotations

from typing import ClassVar


class HullspeedError(Exception):
    """What happened, the value seen, and what to do about it.

    Args:
        what: One sentence: what is wrong. Never a bare value.
        seen: The offending value, shown with ``repr`` and cut at 200 characters.
        fix: What the reader can do now.
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, what: str, *, seen: object = None, fix: str = "") -> None:
        self.what = what
        self.seen = seen
        self.fix = fix
        super().__init__(what, seen, fix)

    def __str__(self) -> str:
        text = self.what
        if self.seen is not None:
            shown = repr(self.seen)
            text += f" (got {shown if len(shown) <= 200 else shown[:197] + '...'})"
        return f"{text}. {self.fix}" if self.fix else text


class UsageError(HullspeedError):
    """A flag, option or combination that cannot be."""

    exit_code = 2
    http_status = 400


class ModelError(HullspeedError):
    """The model's files."""

    exit_code = 2


class SourceError(ModelError):
    """The model's files cannot be found, fetched or verified."""


class CorruptFileError(ModelError):
    """A model file is cut short or contradicts itself."""


class UnsupportedModelError(ModelError):
    """A model that is understood, but that we cannot size or run."""


class RequestError(HullspeedError):
    """One request is wrong; nothing else is disturbed.

    Args:
        param: The request field at fault, as the API names it.
    """

    http_status = 400
    code: ClassVar[str] = "invalid_request"

    def __init__(
        self, what: str, *, seen: object = None, fix: str = "", param: str | None = None
    ) -> None:
        super().__init__(what, seen=seen, fix=fix)
        self.param = param


class ContextOverflowError(RequestError):
    """The prompt and the tokens asked for exceed the model's context."""

    code = "context_length_exceeded"


class UnknownModelError(RequestError):
    """A model name that is not served here."""

    http_status = 404
    code = "model_not_found"


class CapacityError(HullspeedError):
    """Correct, but it does not fit in the memory there is."""


class BrokenStackError(HullspeedError):
    """Driver, runtime or package missing or mismatched."""

    exit_code = 3


class EngineError(HullspeedError):
    """The engine stopped; the requests in flight failed."""

    exit_code = 3
    http_status = 503


class IntegrityError(EngineError):
    """Our own bookkeeping contradicts itself: a bug, never input."""
