"""A communicator for a worker of a flow: the run's hub is the directory, and its secret is what connections prove."""

from __future__ import annotations

from typing import Any

from rlinf_comm.communicator import Communicator
from rlinf_core import Worker


def communicator_of(worker: Worker, **options: Any) -> Communicator:
    """The communicator of this rank, under its own name (``actor[0]``); make it in ``setup``, close it in ``teardown``.

        class Actor(Worker):
            def setup(self):
                self.comm = communicator_of(self)

            @task
            def swap(self):
                self.comm.send(self.state, "actor[1]")

    ``options`` are those of ``Communicator``. A rank makes one only: a second one would take the name over.
    """
    peer = worker.peer
    return Communicator(peer.name, peer.secret, peer.directory, host=peer.host, **options)
