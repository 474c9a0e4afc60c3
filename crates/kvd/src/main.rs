//! Entry point of `kvd`.
fn main() {}
