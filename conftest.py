"""Makes a bare checkout's tests see the pytest plugin that an installed package registers by its entry point."""

pytest_plugins = ["parity.plugin"]
