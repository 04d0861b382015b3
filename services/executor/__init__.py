"""The executor: weights, KV tensors, the persistent batch. No text, no requests' lives."""

import os

# Threads of torch and numba that wait must sleep soon. By default libgomp's spin for milliseconds, and on a machine
# whose cores are shared (with the other two services, say) a step then takes many times as long. Sleeping at once costs
# a wake-up for each of a step's hundreds of parallel regions; 20,000 spins, some 0.2 ms, last from one to the next and
# no longer. Both are read when torch is first imported.
THREAD_WAITS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
for _name, _value in THREAD_WAITS.items():
    os.environ.setdefault(_name, _value)
