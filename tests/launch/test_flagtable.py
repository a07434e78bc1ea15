"""The flag tables: well formed, versioned, and what replaces a flag exists."""

from __future__ import annotations

import shlex

import pytest
from packaging.version import Version

from hullspeed.errors import UsageError
from hullspeed.launch.flagtable import ENGINES, FlagTable, replacements


@pytest.mark.parametrize("engine", ENGINES)
def test_every_checked_version_has_flags(engine: str) -> None:
    checked = FlagTable(engine).checked
    assert list(checked) == sorted(checked, key=Version)
    for version in checked:
        table = FlagTable(engine, version)
        assert len(table.flags) > 15
        for name, flag in table.flags.items():
            assert name.startswith("--")
            assert table.match(name) is not None
            for alias in flag.aliases:
                assert table.match(alias) is not None or alias.startswith("-")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_replaces_a_flag_exists(engine: str) -> None:
    table = FlagTable(engine)
    for old, new in replacements(engine).items():
        words = shlex.split(new.now.format(value="1"))
        if not words:
            continue
        match = table.match(words[0])
        assert match is not None, old
        assert not match.abbreviated
        assert not match.flag.deprecated
        assert new.why


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_gone_flag_is_gone_or_marked_in_the_newest_table(engine: str) -> None:
    table = FlagTable(engine)
    for old in replacements(engine):
        match = table.match(old)
        sound = match is not None and not match.abbreviated and not match.flag.deprecated
        assert not sound or old == "--disable-log-requests"  # an alias again since 0.33


def test_vllm_reads_underscores_keys_and_negations() -> None:
    table = FlagTable("vllm")
    match = table.match("--max_num_seqs")
    assert match is not None
    assert match.name == "--max-num-seqs"
    match = table.match("--speculative-config.num_speculative_tokens")
    assert match is not None
    assert (match.name, match.key) == ("--speculative-config", "num_speculative_tokens")
    match = table.match("--no-enable-prefix-caching")
    assert match is not None
    assert match.negated
    match = table.match("--disable-prefix-caching")
    assert match is not None
    assert match.negated
    assert FlagTable("vllm", "0.32.0").match("--disable-prefix-caching") is None


def test_argparse_completes_a_unique_beginning_only() -> None:
    table = FlagTable("sglang")
    match = table.match("--enable-flashinfer")
    assert match is not None
    assert match.abbreviated
    assert match.name == "--enable-flashinfer-allreduce-fusion"
    assert table.match("--enable-") is None
    assert FlagTable("trtllm").match("--max_batch") is None


def test_a_patch_release_has_its_minor_s_flags() -> None:
    assert FlagTable("vllm", "0.20.2").flags.keys() == FlagTable("vllm", "0.20.0").flags.keys()
    assert FlagTable("vllm", "0.19.0").version == "0.19.1"


@pytest.mark.parametrize("version", ["0.18.0", "0.34.0", "latest", ""])
def test_a_version_outside_the_table_is_refused(version: str) -> None:
    if version:
        with pytest.raises(UsageError):
            FlagTable("vllm", version)
    with pytest.raises(UsageError, match="no flag table"):
        FlagTable("llama.cpp")
