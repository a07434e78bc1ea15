"""Text to tokens and back: tokenizer, streaming detokenizer, stop strings, chat templates."""
