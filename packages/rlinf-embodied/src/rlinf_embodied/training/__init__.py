"""What the actor does with the trajectories of a step, over any trainer backend.

Everything here gives the same result with one rank or several: decisions are ordered by slot id and step, minibatches
are cut out of the decisions of all ranks, losses are sums that are divided once by the count over all ranks.
"""

from rlinf_embodied.training.network import load_trainer, network_spec
from rlinf_embodied.training.update import GrpoUpdate, PpoUpdate, Update, load_update

__all__ = ["GrpoUpdate", "PpoUpdate", "Update", "load_trainer", "load_update", "network_spec"]
