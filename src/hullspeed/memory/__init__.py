"""One byte budget per engine: weights + sequence state + runtime + headroom."""
