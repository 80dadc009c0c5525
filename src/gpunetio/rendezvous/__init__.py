"""How processes find each other before their kernels talk: they exchange values and connect queue pairs.

    with gn.rendezvous.TcpRendezvous(rank, size, "10.0.0.1") as ranks:
        everybody = ranks.allgather({"rank": rank, "cells": 4096})

    Rendezvous        N ranks that gather bytes and JSON values
      TcpRendezvous   over TCP: rank 0 listens, the others connect to it
      MpiRendezvous   a communicator of mpi4py
      StoreRendezvous a store of torch.distributed
    mesh              connected queue pairs to every rank, with the keys of its memory
    Link              a connection between two processes, used by benchmarks and samples
"""

from .endpoints import endpoint_of, endpoint_values
from .environment import from_environment
from .group import Rendezvous
from .link import Link, Message, PeerError, PeerInterrupted, accept, dial, listen, own_address
from .mesh import Mesh, Peer, mesh
from .mpi import MpiRendezvous
from .store import StoreRendezvous
from .tcp import TcpRendezvous

__all__ = [
    "Link", "Mesh", "Message", "MpiRendezvous", "Peer", "PeerError", "PeerInterrupted", "Rendezvous", "StoreRendezvous",
    "TcpRendezvous", "accept", "dial", "endpoint_of", "endpoint_values", "from_environment", "listen", "mesh",
    "own_address",
]
