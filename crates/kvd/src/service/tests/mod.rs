//! The service over a small CPU device that can be held, watched and made to fail.

mod bench;
mod failure;
mod limits;
mod models;
mod packing;
mod queries;
