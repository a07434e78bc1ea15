"""recorded: prompts and outputs of a recorded server, from the hashes of their blocks.

``{"isl", "osl", "block_tokens": 64, "blocks": [name, ...], "fork": [index, name, tokens]}``: the
blocks are those of prompt and output together, the last of which may be short (or those of the
prompt's first tokens alone). Equal names are equal prefixes up to the block's end. The block at
``index`` was new, and begins with the first ``tokens`` tokens of the block ``name``.
"""

from __future__ import annotations

from hullspeed.twin.rows import Row
from hullspeed.twin.workload import Contents, Part, cut, total_tokens

Parts = tuple[Part, ...]


class Blocks:
    """What every block seen so far holds, by its name."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._known: dict[str, Parts] = {}

    def read(self, row: Row) -> tuple[Parts, Parts]:
        """Prompt and output of a row; the output is empty where no block names it.

        Raises:
            UsageError: naming the row.
        """
        isl, osl, size = row.tokens("isl"), row.tokens("osl", least=0), row.tokens("block_tokens")
        names = row.get("blocks")
        if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
            raise row.wrong("blocks is a list of hashes", seen=names)
        if len(names) * size >= isl + osl + size:
            raise row.wrong(
                f"{len(names)} blocks of {size} are more than isl and osl", seen=isl + osl
            )
        fork_at, like, shared = _fork(row, len(names), size)
        parts: list[Part] = []
        for index, name in enumerate(map(str, names)):
            n_tokens = min(size, isl + osl - index * size)
            if name not in self._known:
                begin = self._known.get(like, ()) if index == fork_at else ()
                self._known[name] = self._new(cut(begin, shared)[0], n_tokens)
            known = self._known[name]
            if total_tokens(known) != n_tokens:
                raise row.wrong(f"block {name} had {total_tokens(known)} tokens", seen=n_tokens)
            parts += known
        prompt, said = cut(parts, isl)
        if missing := isl - total_tokens(prompt):
            prompt = (*prompt, Part(self._contents.new(), missing))
        if said and (missing := osl - total_tokens(said)):
            said = (*said, Part(self._contents.new(), missing))
        return prompt, said

    def _new(self, begin: Parts, n_tokens: int) -> Parts:
        begin = cut(begin, n_tokens)[0]
        left = n_tokens - total_tokens(begin)
        return (*begin, Part(self._contents.new(), left)) if left else begin


def _fork(row: Row, n_blocks: int, size: int) -> tuple[int, str, int]:
    """Index, name and tokens; index -1 where the row has no fork."""
    fork = row.fields.get("fork")
    if fork is None:
        return -1, "", 0
    good = (
        isinstance(fork, list)
        and len(fork) == 3
        and isinstance(fork[0], int)
        and isinstance(fork[2], int)
        and 0 <= fork[0] < n_blocks
        and 0 < fork[2] <= size
    )
    if not good:
        raise row.wrong("fork is [index of a block, name of a block, tokens they share]", seen=fork)
    return fork[0], str(fork[1]), fork[2]
