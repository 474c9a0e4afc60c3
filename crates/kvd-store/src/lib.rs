//! Pools, slots, blocks and sequences: who holds which bytes, never the bytes themselves.
