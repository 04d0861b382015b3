"""Load generators, stub services, benchmarks: `python -m loadtest.NAME`."""

import services.executor  # noqa: F401 - before torch, since it says how torch's threads wait
