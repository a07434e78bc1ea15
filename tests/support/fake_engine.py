"""A model and an engine for tests of the server: bytes as tokens, the prompt as the answer.

``FakeLink`` keeps the engine's side of the contract (``runtime/messages.py``) on the caller's
event loop: one token a step for every running sequence, pages counted, cancels obeyed at the next
step. The output of a request repeats its own prompt, so any mix-up between requests shows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from hullspeed.core.sampling import SamplingParams
from hullspeed.runtime.messages import (
    Cancel,
    Delta,
    EngineStats,
    Failed,
    FromEngine,
    ModelInfo,
    Outputs,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
)
from hullspeed.server.service import Texts
from hullspeed.text.chat import ChatFormat
from hullspeed.text.template import ChatTemplate
from hullspeed.text.tokenizer import Tokenizer

CONTROL = {"<|im_start|>": 256, "<|im_end|>": 257}
EOS = 257
VOCAB = 258
PAGE_TOKENS = 16
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Every byte a token, in the order of GPT-2's byte alphabet; two control tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    chars = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    backend = Backend(models.BPE(vocab={chars[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, control=CONTROL, vocab=VOCAB, eos_ids=(EOS,))


def byte_texts() -> Texts:
    """Tokenizer and ChatML template of the fake model."""
    tokenizer = byte_tokenizer()
    return Texts.of(tokenizer, ChatFormat(tokenizer, ChatTemplate(TEMPLATE)))


def fake_info(
    *, context: int = 4096, n_pages: int = 2048, max_running: int = 64, step_tokens: int = 512
) -> ModelInfo:
    """What the fake engine says it loaded."""
    return ModelInfo(
        name="fake", family="fake", vocab=VOCAB, max_context_tokens=context, eos_token_ids=(EOS,),
        param_count=0, weight_bytes=0, kv_bytes_per_token=1, page_tokens=PAGE_TOKENS,
        n_pages=n_pages, max_running=max_running, step_tokens=step_tokens, threads=1,
        kernels="fake", weight_dtype="fp32",
    )  # fmt: skip


@dataclass
class Running:
    """One sequence of the fake engine."""

    id: int
    prompt: list[int]
    sampling: SamplingParams
    salt: bytes
    output: list[int] = field(default_factory=list)

    def step(self, script: list[int]) -> tuple[int, str | None]:
        """The next token, and why it is the last, if it is."""
        token = script[len(self.output) % len(script)]
        self.output.append(token)
        ends = {*self.sampling.stop_token_ids, *(() if self.sampling.ignore_eos else (EOS,))}
        if token in ends and len(self.output) > self.sampling.min_tokens:
            return token, "stop"
        return token, "length" if len(self.output) == self.sampling.max_tokens else None

    @property
    def pages(self) -> int:
        """Pages it holds."""
        return -(-(len(self.prompt) + len(self.output)) // PAGE_TOKENS)


class FakeLink:
    """One life of the fake engine.

    Args:
        step_s: Duration of a step.
        script: Output tokens for a prompt, repeated; the prompt itself unless given.
        fail: Reported instead of ``Ready``.
        held: Loading ends with ``release``, and not before.
    """

    def __init__(
        self,
        info: ModelInfo | None = None,
        *,
        step_s: float = 0.0005,
        load_s: float = 0.0,
        script: Callable[[Submit], list[int]] | None = None,
        fail: Failed | None = None,
        held: bool = False,
    ) -> None:
        self.info = info or fake_info()
        self.step_s = step_s
        self.load_s = load_s
        self.script = script
        self.fail = fail
        self.submits: list[Submit] = []
        self.cancels: list[int] = []
        self.silent = False
        self.steps = 0
        self.generated = 0
        self.running: dict[int, Running] = {}
        self.waiting: list[Running] = []
        self._seen: set[tuple[bytes, tuple[int, ...]]] = set()
        self._scripts: dict[int, list[int]] = {}
        self._exit: asyncio.Future[int] | None = None
        self._work = asyncio.Event()
        self._loaded = asyncio.Event()
        if not held:
            self.release()
        self._tell: Callable[[FromEngine], None] = lambda _: None

    async def run(self, on_message: Callable[[FromEngine], None]) -> int:
        """Load, step while there is work, beat while there is none."""
        self._tell = on_message
        self._exit = asyncio.get_running_loop().create_future()
        await asyncio.sleep(self.load_s)
        await self._loaded.wait()
        if self.fail is not None:
            on_message(self.fail)
            return self.fail.exit_code
        on_message(Ready(info=self.info, load_s=self.load_s))
        stepping = asyncio.create_task(self._steps())
        try:
            return await self._exit
        finally:
            stepping.cancel()

    def send(self, message: ToEngine) -> None:
        """Take a message at once."""
        if isinstance(message, Submit):
            self.submits.append(message)
            sequence = Running(message.id, message.prompt, message.sampling, message.salt)
            self._scripts[message.id] = self.script(message) if self.script else message.prompt
            self.waiting.append(sequence)
            self._work.set()
        elif isinstance(message, Cancel):
            self.cancels += message.ids
            for id_ in message.ids:
                self.running.pop(id_, None)
            self.waiting = [s for s in self.waiting if s.id not in message.ids]
        elif isinstance(message, Shutdown):
            self.die(0)

    def release(self) -> None:
        """Let a held load end."""
        self._loaded.set()

    def kill(self) -> None:
        """As SIGKILL would."""
        self.die(-9)

    def die(self, status: int) -> None:
        """End with ``status``; whatever ran is lost."""
        if self._exit is not None and not self._exit.done():
            self._exit.set_result(status)

    def error(self, id_: int, text: str) -> None:
        """End one request with an error of the engine."""
        self.running.pop(id_, None)
        self._tell(Outputs([Delta(id_, [], finish="error", error=text)]))

    async def _steps(self) -> None:
        while True:
            if not self.silent:
                self._tell(self._stats())
            if not self.running and not self.waiting:
                self._work.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._work.wait(), 0.05)
                continue
            await asyncio.sleep(self.step_s)
            self._step()

    def _step(self) -> None:
        self.steps += 1
        while self.waiting and len(self.running) < self.info.max_running:
            sequence = self.waiting.pop(0)
            self.running[sequence.id] = sequence
        deltas = []
        for sequence in list(self.running.values()):
            first = not sequence.output
            token, finish = sequence.step(self._scripts[sequence.id])
            self.generated += 1
            logprobs = None
            if sequence.sampling.logprobs is not None:
                top = tuple((t, -1.0 - t) for t in range(sequence.sampling.logprobs))
                logprobs = [(-0.5, top)]
            cached = self._cached(sequence) if first else None
            deltas.append(
                Delta(sequence.id, [token], logprobs, cached, finish, None, 0.0 if first else None)
            )
            if finish:
                del self.running[sequence.id]
        if deltas:
            self._tell(Outputs(deltas))

    def _cached(self, sequence: Running) -> int:
        key = (sequence.salt, tuple(sequence.prompt))
        if key in self._seen:
            return len(sequence.prompt) - 1
        self._seen.add(key)
        return 0

    def _stats(self) -> EngineStats:
        used = sum(sequence.pages for sequence in self.running.values())
        return EngineStats(
            steps_total=self.steps, running=len(self.running), waiting=len(self.waiting),
            pages_free=self.info.n_pages - used, pages_cached=0, pages_used=used,
            pages_total=self.info.n_pages, preemptions_total=0, prefix_queried_total=0,
            prefix_hit_total=0, prompt_tokens_total=0, generated_tokens_total=self.generated,
            step_tokens_last=len(self.running), step_s_last=self.step_s,
        )  # fmt: skip
