"""All of it in order: pull, plan, preflight, serve, verify, bench, one report."""
