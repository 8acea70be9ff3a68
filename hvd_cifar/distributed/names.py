"""Names of collectives inside graphs.

Horovod matches the ranks' operations by their names. Its default in a graph comes from the name of the input, which
counts the operations and tensors that the process has made: ranks that made other numbers of them wait for ever. Names
from here count collectives alone, of which every rank has the same. Eagerly TensorFlow ignores an operation's name:
eager collectives meet by their order.
"""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf


def in_graph(kind: Literal["Allreduce", "Allgather", "Broadcast"], role: str) -> dict[str, Any]:
    """The arguments that name a collective of Horovod; none outside of a graph.

    A role's collectives are counted over the outermost graph, whose branches and functions may run side by side. Scopes
    are left out, since TensorFlow numbers those of branches and functions by other operations.

    Args:
        kind: by it `hvd.elastic.run` knows Horovod's errors; of any other error it returns as if training had ended. It
            does not know all-to-alls, which are named as all-gathers.
        role: what the collective is for, such as "gradients".
    """
    if tf.executing_eagerly():
        return {}
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    roles = graph.get_collection_ref("hvd_cifar_collectives")
    roles.append(role)
    return {"name": f"Horovod{kind}_{role}_{roles.count(role)}", "ignore_name_scope": True}
