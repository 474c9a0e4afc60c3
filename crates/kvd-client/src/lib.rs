//! Rust client of the kvd daemon.
