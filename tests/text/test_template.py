from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hullspeed.errors import BrokenStackError, RequestError, UnsupportedModelError
from hullspeed.text import template as template_module
from hullspeed.text.template import ChatTemplate, TemplateLimits
from support.patience import PATIENCE_S

FOLDER = Path(__file__).with_name("templates")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "<b>now</b> & 'later' für Köln",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
]  # fmt: skip
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "é 中 🤷 <x>\n"}],
    [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer"},
        {"role": "user", "content": "second"},
    ],
    [
        {"role": "system", "content": "tools"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"function": {"name": "weather", "arguments": {"city": "Köln", "n": 1.5}}},
            {"function": {"name": "weather", "arguments": '{"city": "x"}'}}]},
        {"role": "tool", "content": "12°"},
        {"role": "tool", "content": "13°"},
    ],
]  # fmt: skip


def theirs(source: str, messages: list[dict[str, Any]], **values: Any) -> str:
    rendered = render_jinja_template([messages], chat_template=source, **values)
    return str(rendered[0][0])


@pytest.fixture(scope="module")
def thinking() -> Iterator[ChatTemplate]:
    with ChatTemplate((FOLDER / "thinking_tools.jinja").read_text()) as template:
        yield template


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize(
    "values",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": True, "enable_thinking": False},
        {"add_generation_prompt": False, "tools": TOOLS},
    ],
)
def test_text_equals_transformers(
    thinking: ChatTemplate, messages: list[dict[str, Any]], values: dict[str, Any]
) -> None:
    given = {"messages": messages, "tools": None, "documents": None, **values, **SPECIAL}
    assert thinking.render(given) == theirs(thinking.source, messages, **values, **SPECIAL)


def test_block_whitespace_and_the_generation_tag_equal_transformers() -> None:
    source = (FOLDER / "alternating.jinja").read_text()
    with ChatTemplate(source) as template:
        for messages in CONVERSATIONS[:3]:
            given = {"messages": messages, "add_generation_prompt": False, **SPECIAL}
            assert template.render(given) == theirs(source, messages, **SPECIAL)


def test_smollm2s_own_template_equals_transformers(smollm2_metadata: Mapping[str, Any]) -> None:
    source = smollm2_metadata["tokenizer.chat_template"]
    with ChatTemplate(source) as template:
        for messages in CONVERSATIONS[:3]:
            given = {"messages": messages, "add_generation_prompt": True}
            assert template.render(given) == theirs(source, messages, add_generation_prompt=True)


def test_the_date_can_be_asked_for() -> None:
    with ChatTemplate("{{ strftime_now('%Y') }}") as template:
        assert int(template.render({})) >= 2026


def test_a_templates_refusal_is_the_requests_error(thinking: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="No user query found") as caught:
        thinking.render({"messages": [{"role": "assistant", "content": "x"}]})
    assert caught.value.param == "messages"


def test_a_template_that_is_no_jinja_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedModelError, match="not valid"):
        ChatTemplate("{% for x in %}")


GADGETS = [
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ lipsum|attr('__globals__') }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['sys'] }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ (''|attr('__class__')).mro() }}",
    "{{ ().__class__.__bases__[0].__subclasses__()[0] }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '%s'.__class__.format_map }}",
    "{{ config.items }}",
    "{% set ns = namespace(__class__='x') %}{{ ns.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ tools.update({'a': 1}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ __import__('os') }}",
    "{{ get_flashed_messages.__globals__ }}",
]


@pytest.mark.parametrize("source", GADGETS)
def test_gadgets_reach_nothing(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with ChatTemplate(source, workers=1) as template:
        try:
            text = template.render({"messages": messages, "tools": {"b": 2}})
        except RequestError:
            return
    leaks = ("uid=", "root:", "module", "class", "function", "object", "builtin", "{'")
    assert not any(leak in text for leak in leaks), text


HOGS = [
    "{{ 'a' * 10**9 }}",
    "{{ 'a' * 10**12 }}",
    "{{ ['x'] * 10**9 }}",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "{{ lipsum(n=90000, min=1000, max=2000) }}",
    "{{ range(10**9)|list }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
]
QUICK = TemplateLimits(timeout_s=1.0, memory_bytes=256 * 1024 * 1024)
PATIENT = QUICK._replace(timeout_s=5.0)  # room for renders that are to end, on any machine


@pytest.mark.parametrize("source", HOGS)
def test_hogs_break_a_limit_and_nothing_else(source: str) -> None:
    with ChatTemplate(source, limits=QUICK, workers=1) as template, pytest.raises(RequestError):
        template.render({"messages": []})


LOOP = (
    "{% if wedge %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}ok"
)


def test_a_wedged_template_does_not_hold_up_others() -> None:
    with ChatTemplate(LOOP, limits=PATIENT, workers=2) as template:
        failures: list[Exception] = []

        def wedge() -> None:
            try:
                template.render({"wedge": True})
            except RequestError as error:
                failures.append(error)

        thread = threading.Thread(target=wedge)
        thread.start()
        time.sleep(0.2)
        assert [template.render({"wedge": False}) for _ in range(5)] == ["ok"] * 5
        assert not failures
        thread.join(PATIENCE_S)
        assert "did not finish" in str(failures[0])
        assert template.render({"wedge": False}) == "ok"


def test_a_killed_worker_is_replaced_and_none_is_left_behind() -> None:
    before = set(psutil.Process().children())
    template = ChatTemplate("ok", workers=2)
    for _ in range(2):
        for child in set(psutil.Process().children()) - before:
            child.kill()
            child.wait()
        with pytest.raises(RequestError):
            template.render({})
        assert template.render({}) == "ok"
    template.close()
    assert set(psutil.Process().children()) - before == set()
    with pytest.raises(RequestError, match="closed"):
        template.render({})


def test_closing_wakes_who_waits_and_leaves_nobody() -> None:
    before = set(psutil.Process().children())
    # The wedged one ends at its limit, which the others must not reach before the close.
    template = ChatTemplate(LOOP, limits=PATIENT._replace(timeout_s=12.0), workers=1)
    outcomes: list[str] = []

    def render(wedge: bool) -> None:
        try:
            outcomes.append(template.render({"wedge": wedge}))
        except RequestError as error:
            outcomes.append(error.what)

    threads = [threading.Thread(target=render, args=(i == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    template.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert outcomes.count("the chat template is closed") == 3
    assert set(psutil.Process().children()) - before == set()


def test_a_worker_sees_no_environment_and_imports_none_of_us() -> None:
    before = set(psutil.Process().children())
    with ChatTemplate("ok", workers=1):
        (worker,) = set(psutil.Process().children()) - before
        assert not any(k for k in worker.environ() if k not in ("LC_CTYPE",))
        mapped = {Path(m.path).name for m in worker.memory_maps()}
        assert not any(name.startswith(("libtorch", "_msgspec")) for name in mapped)


def test_a_worker_starts_as_fast_as_its_imports() -> None:
    def first_render() -> None:
        with ChatTemplate("ok", workers=1) as template:
            template.render({})

    def imports() -> None:
        subprocess.run([sys.executable, "-I", "-c", "import jinja2.sandbox"], check=True)

    seconds: dict[Callable[[], None], list[float]] = {first_render: [], imports: []}
    for _ in range(5):
        for start, taken in seconds.items():
            begin_s = time.monotonic()
            start()
            taken.append(time.monotonic() - begin_s)
    assert min(seconds[first_render]) < 3 * min(seconds[imports])


def test_a_worker_that_cannot_start_is_a_broken_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import no_such_module")
    monkeypatch.setattr(template_module, "_WORKER", script)
    with pytest.raises(BrokenStackError, match="does not start"):
        ChatTemplate("ok")


def test_long_input_and_output_pass(thinking: ChatTemplate) -> None:
    text = "long é\n" * 100_000
    rendered = thinking.render({"messages": [{"role": "user", "content": text}]})
    assert text in rendered
    assert json.loads(json.dumps(rendered)) == rendered
