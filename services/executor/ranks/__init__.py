"""Tensor parallelism: one executor of several processes, each with a part of every divided layer.

Rank 0 serves the contract, leads, and samples; its peers do what it does, step by step. They are child processes, or
were started on machines of their own and come to an address of rank 0. What they are told goes through a pair of
sockets or a TCP connection each; partial sums through torch.distributed.
"""
