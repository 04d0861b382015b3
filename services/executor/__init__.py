"""The executor: weights, KV tensors, the persistent batch. No text, no requests' lives."""

import os

# Threads of torch and numba that wait must sleep. By default libgomp's spin for a while, and on a machine whose cores
# are shared (with the other two services, say) a step then takes many times as long. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
