//! Generated gRPC code of kvd and strict domain types.
