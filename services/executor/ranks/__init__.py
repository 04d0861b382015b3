"""Tensor parallelism: one executor of several processes, each with a part of every divided layer.

Rank 0 serves the contract, leads, and samples; its peers are child processes that do what it does, step by step. What
they are told goes through a pair of sockets each; partial sums through torch.distributed (gloo, on loopback).
"""
