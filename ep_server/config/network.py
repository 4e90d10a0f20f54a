"""The options of several nodes: how they meet, and the network between them. As sections.py."""

from __future__ import annotations

from dataclasses import dataclass

from ep_server.config.sections import option

RENDEZVOUS_PORT = 50061  # where cluster.rendezvous has a host from elsewhere and no port


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Several nodes as one server (docs/how-to/several-nodes.md)."""

    nodes: int = option(1, "Nodes of this server. Each runs parallel.ranks rank processes.", low=1, high=64)
    node_rank: int = option(
        -1,
        "Number of this node; 0 leads. -1: from LeaderWorkerSet, the Pod's ordinal or the hostfile.",
        low=-1,
        high=63,
    )
    rendezvous: str = option(
        "",
        "host:port where node 0 listens for the others. :port, or empty for port "
        f"{RENDEZVOUS_PORT}: the host comes from LeaderWorkerSet or the hostfile.",
    )
    hostfile: str = option("", "File with one host per line, in the order of node numbers.")
    token_file: str = option("", "File with the token that nodes authenticate each other with.")
    tls_cert: str = option("", "PEM certificate chain of this node, for mutual TLS between nodes.")
    tls_key: str = option("", "PEM private key.")
    tls_ca: str = option("", "PEM CA bundle that signed the certificates of all nodes.")
    connect_seconds: float = option(120.0, "Seconds to wait until every node has joined.", low=1, high=86400)
    silent_seconds: float = option(
        5.0, "A node is lost if it answers no ping for this long.", low=0.5, high=3600
    )


@dataclass(frozen=True, slots=True)
class FabricConfig:
    """The network between nodes, through libfabric (docs/reference/fabric.md)."""

    library: str = option("", "Path of libfabric.so.1. Empty: the loader finds it.")
    provider: str = option("", "Provider as libfabric names it. Empty: chosen by capability.")
    domain: str = option(
        "",
        "Network device or interface; a comma-separated list has one per rank of this node. Empty: "
        "the provider's first.",
    )
    address: str = option("", "Address of this host on that network. Empty: the provider's choice.")
    interface: str = option(
        "",
        "Network interface that verbs and TCP must use; a comma-separated list has one per rank of "
        "this node.",
    )
    traffic_class: str = option(
        "",
        "DSCP from 0 to 63, or a class of libfabric such as low_latency or bulk_data. Empty: the "
        "provider's default.",
    )
    gid_index: int = option(
        -1, "Index in the GID table of verbs. -1: the provider's default.", low=-1, high=255
    )
    queue_depth: int = option(
        0,
        "Writes in flight of one rank, at least scheduler.max_step_tokens + 3. 0: the provider's default.",
        low=0,
        high=1 << 16,
    )
    adaptive_routing: bool = option(
        True, "Writes may overtake one another on the network. false: request them in order."
    )
