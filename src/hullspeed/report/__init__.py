"""Tables, bars and the self-contained HTML report."""
