"""How each engine accounts memory, by version: data files that ``memory.profile`` reads."""
