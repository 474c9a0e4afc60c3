//! Backend trait, attention plan, partial-state merge, and the CPU backend.
