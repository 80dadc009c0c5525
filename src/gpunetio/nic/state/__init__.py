"""The NIC's state: flat tables of 64-bit fields, which the engine reads by address and Python code by name.

`nic.qps[qpn]` is a row of `QP_ROW`. Only the engine's thread writes rows that are in use. The command interpreter
prepares a new row elsewhere and posts it to the engine (host/engine.py). Each structure is declared by `record`, which
says what its columns mean.
"""
