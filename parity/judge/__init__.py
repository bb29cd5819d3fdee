"""What is decided: contracts, the arithmetic behind them, error bounds, selection rules and verdicts."""
