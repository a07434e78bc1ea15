"""Rules: each looks at one case and yields what is wrong with it."""
