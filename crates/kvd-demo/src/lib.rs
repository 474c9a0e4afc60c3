//! A small real language model whose every attention goes through a kvd daemon.
