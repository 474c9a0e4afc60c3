//! The KV-cache memory daemon.
